"""A step's tokens and answers, kept for the drafts of the steps after it."""

import torch

from esp_kernels import _backend
from esp_kernels._check import ANY, check_index, require
from esp_kernels.ops._memory import Memory, check_like_ids, check_memory


def remember_block(
    memory: Memory,
    tokens: torch.Tensor,
    parent: torch.Tensor,
    mask_ordinal: torch.Tensor,
    ids: torch.Tensor,
    logprobs: torch.Tensor,
    committed: torch.Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Keep what the model said behind every token row of a block, then append what was committed.

    memory        written IN PLACE; its last token is the block's root, unless the block has no rows
    tokens        [B, T] int32, and likewise parent and mask_ordinal: the block that was run
    ids           [B, T, N] int32: each row's most probable tokens, best first, as topk_logprobs gives them
    logprobs      [B, T, N] float32
    committed     [B, M] int32: tokens to append, the oldest first; negative entries are skipped

    Behind every row with mask_ordinal 0 end contexts of n = 1 to 4 tokens, where there are so many: its own
    token, those above it up to the root, and the history before that. The first L of the row's tokens become
    the list of each of these contexts, and take the slot from whatever had it: rows in order, so that the
    last one stays. Appending a token enters the n-grams that end with it into the index of the history, in
    constant time (Token Recycling, arXiv 2408.08696, keeps n = 1; prompt lookup looks for copies only).

    Raises ValueError on shapes, dtypes, devices or strides that are not as above and, on the CPU, on a parent
    that is no earlier row and on a history without room; elsewhere tokens without room are dropped.
    """
    run = _backend.select("remember_block", backend, memory.history, "history")
    run(*memory, tokens, parent, mask_ordinal, ids, logprobs, committed)


def check(
    history: torch.Tensor,
    length: torch.Tensor,
    heads: torch.Tensor,
    links: torch.Tensor,
    keys: torch.Tensor,
    list_ids: torch.Tensor,
    list_logprobs: torch.Tensor,
    tokens: torch.Tensor,
    parent: torch.Tensor,
    mask_ordinal: torch.Tensor,
    ids: torch.Tensor,
    logprobs: torch.Tensor,
    committed: torch.Tensor,
) -> None:
    check_memory(Memory(history, length, heads, links, keys, list_ids, list_logprobs))
    batch, capacity = history.shape
    check_index(tokens, "tokens", history, batch, ANY)
    rows = tokens.shape[1]
    check_index(parent, "parent", history, batch, rows)
    check_index(mask_ordinal, "mask_ordinal", history, batch, rows)
    check_index(ids, "ids", history, batch, rows, ANY)
    check_like_ids(logprobs, "logprobs", ids)
    check_index(committed, "committed", history, batch, ANY)
    if history.device.type != "cpu":
        return
    for b, (above, ordinals) in enumerate(zip(parent.tolist(), mask_ordinal.tolist(), strict=True)):
        for r, (p, ordinal) in enumerate(zip(above, ordinals, strict=True)):
            require(
                ordinal != 0 or p < r,
                f"parent[{b}, {r}] must be negative or an earlier row, got {p}",
            )
    for b, (used, new) in enumerate(zip(length.tolist(), (committed >= 0).sum(1).tolist(), strict=True)):
        require(
            used + new <= capacity,
            f"history has room for {capacity} tokens, sequence {b} has {used} and {new} are committed",
        )
