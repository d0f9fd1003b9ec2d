"""The next block of a decode: a draft tree under a row budget, and the mask rows of its nodes."""

from collections.abc import Sequence

import torch

from esp_kernels import _backend
from esp_kernels._check import (
    ANY,
    check_contiguous,
    check_device,
    check_dtype,
    check_index,
    check_shape,
    require,
)

MAX_BUDGET = 4096


def expand_tree(
    root: torch.Tensor,
    ids: torch.Tensor,
    logprobs: torch.Tensor,
    budget: int,
    masks: int,
    widths: Sequence[int] | None = None,
    prune: bool = True,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draft a tree of `nodes` rows from each level's candidates, and give every node `masks` mask rows.

    root      [B] int32: the token of row 0; negative for a padded sequence
    ids       [B, L, N] int32: level i's candidates for draft tokens at depth i + 1, distinct in each level
    logprobs  [B, L, N] float32: their log-probabilities (natural logarithm), descending in each level; what
              is above 0 counts as 0
    budget    1 to 4096: the most rows that the block may have
    masks     0 to budget - 1: mask rows a node
    widths    None for the dynamic tree below, or a static tree's drafts a level, for at most L levels
    prune     skip candidates that equal their parent's token; the next best takes their place
    returns   tokens, parent, mask_ordinal, each [B, nodes * (masks + 1)] int32, with rows
              [root | drafts 1..nodes-1 | masks 1..k of row 0 | masks 1..k of row 1 | ...]:
              mask i of node v is row nodes + v * k + i - 1 and hangs from v (i = 1) or the row before; its
              token is -1 and its ordinal i. Padding has token -1, parent PADDING and ordinal -1

    All tensors are contiguous. A candidate whose id is negative or whose log-probability is not finite is
    never drafted. Where candidates run out the remaining draft rows are padding, and so are their masks.

    Dynamic: nodes = budget // (masks + 1), and the drafts are the nodes - 1 best by cumulative
    log-probability, the sum from the root down in float32: in rows by (cumulative descending, depth, parent's
    row, rank in the level). This is the tree of the paper's Algorithm 1, which keeps the B - i best of each
    depth i and then the B - 1 best of all (B = nodes). Proof: no child precedes its parent in this order, so
    a draft of depth i among the B - 1 best has its i - 1 ancestors before it, hence at most B - 1 - i others
    of its own depth: it is among the B - i best of its depth, as are its ancestors of theirs.

    Static: nodes = 1 + sum(widths). The widths[i] drafts of level i all hang from the first draft of the
    level before, in candidate order, rows level by level; so the structure is fixed but for padding.

    Raises ValueError on shapes, dtypes, devices, strides or numbers that are not as above, widths beyond the
    budget, and on the CPU candidates out of order; on other devices those make a tree, only not the best.
    """
    run = _backend.select("expand_tree", backend, root, "root")
    return run(root, ids, logprobs, budget, masks, widths, prune)


def check(
    root: torch.Tensor,
    ids: torch.Tensor,
    logprobs: torch.Tensor,
    budget: int,
    masks: int,
    widths: Sequence[int] | None = None,
    prune: bool = True,
) -> None:
    check_index(root, "root", root, ANY)
    check_index(ids, "ids", root, root.shape[0], ANY, ANY)
    check_device(logprobs, "logprobs", root)
    check_dtype(logprobs, "logprobs", torch.float32)
    check_shape(logprobs, "logprobs", *ids.shape)
    check_contiguous(logprobs, "logprobs")
    require(1 <= budget <= MAX_BUDGET, f"budget must be 1 to {MAX_BUDGET}, got {budget}")
    require(0 <= masks < budget, f"masks must be 0 to {budget - 1} with a budget of {budget}, got {masks}")
    if widths is not None:
        check_widths(widths, ids.shape[1], budget, masks)
    if root.device.type == "cpu":
        _check_descending(root, ids, logprobs)


def check_widths(widths: Sequence[int], levels: int, budget: int, masks: int) -> None:
    require(
        len(widths) <= levels,
        f"widths must have at most {levels} levels, as ids has, got {len(widths)}",
    )
    for width in widths:
        require(1 <= width <= MAX_BUDGET, f"widths must each be 1 to {MAX_BUDGET}, got {width}")
    rows = (1 + sum(widths)) * (masks + 1)
    require(rows <= budget, f"widths {list(widths)} with {masks} masks need {rows} rows, budget is {budget}")


def _check_descending(root: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor) -> None:
    if logprobs.shape[2] == 0:
        return
    used = (root >= 0)[:, None, None] & (ids >= 0) & logprobs.isfinite()
    lowest = torch.where(used, logprobs, torch.inf).cummin(2).values[..., :-1]
    rises = (used[..., 1:] & (logprobs[..., 1:] > lowest)).nonzero().tolist()
    if rises:
        b, level, n = rises[0]
        got = f"{logprobs[b, level, n + 1]:g} after {lowest[b, level, n]:g}"
        where = f"logprobs[{b}, {level}, {n + 1}]"
        raise ValueError(f"logprobs must descend in each level, got {got} at {where}")
