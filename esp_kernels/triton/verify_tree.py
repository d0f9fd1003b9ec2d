"""One program walks one sequence; each turn looks through all rows for the child to take."""

import torch
import triton
import triton.language as tl


# Bytes: 16 a row. Turns: accepted + 1.
@triton.jit(do_not_specialize=["rows", "choice_stride"])
def _verify_tree_kernel(
    choice, tokens, parent, mask_ordinal, path, accepted, bonus, committed, rows, choice_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    first = b * rows
    row = tl.arange(0, BLOCK)
    inside = row < rows
    above = tl.load(parent + first + row, mask=inside, other=-1)
    token = tl.load(tokens + first + row, mask=inside, other=-1)
    drafted = tl.load(mask_ordinal + first + row, mask=inside, other=-1) == 0

    current = tl.where(tl.load(mask_ordinal + first) == 0, 0, rows)
    taken = current * 0
    wanted = current * 0 - 1
    while current < rows:
        wanted = tl.load(choice + (first + current) * choice_stride)
        tl.store(path + first + taken, current)
        if committed is not None:
            tl.store(committed + first + taken, wanted)
        follows = drafted & (above == current) & (row > current) & (token == wanted)
        current = tl.min(tl.where(follows, row, rows), 0)
        taken += 1
    tl.store(accepted + b, taken - 1)
    tl.store(bonus + b, wanted)
    nothing = tl.full([BLOCK], -1, tl.int32)
    tl.store(path + first + row, nothing, mask=inside & (row >= taken))
    if committed is not None:
        tl.store(committed + first + row, nothing, mask=inside & (row >= taken))


def launch(
    choice: torch.Tensor,
    choice_stride: int,
    tokens: torch.Tensor,
    parent: torch.Tensor,
    mask_ordinal: torch.Tensor,
    committed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`choice` of row r of all B * T rows is element r * choice_stride; `committed` [B, T] is written."""
    batch, rows = tokens.shape
    path = torch.empty_like(tokens)
    if rows == 0:
        return path, tokens.new_full((batch,), -1), tokens.new_full((batch,), -1)
    accepted, bonus = tokens.new_empty(batch), tokens.new_empty(batch)
    if batch > 0:
        block = triton.next_power_of_2(rows)
        _verify_tree_kernel[(batch,)](
            choice, tokens, parent, mask_ordinal, path, accepted, bonus, committed, rows, choice_stride,
            BLOCK=block, num_warps=1 if block <= 128 else 4,
        )  # fmt: skip
    return path, accepted, bonus


def verify_tree(
    choice: torch.Tensor, tokens: torch.Tensor, parent: torch.Tensor, mask_ordinal: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return launch(choice, 1, tokens, parent, mask_ordinal)
