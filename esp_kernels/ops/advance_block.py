"""All that stands between the logits of one block and the next block."""

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
from esp_kernels.ops.embed_block import check_embedding, check_probe
from esp_kernels.ops.expand_tree import check_widths


def advance_block(
    ids: torch.Tensor,
    logprobs: torch.Tensor,
    tokens: torch.Tensor,
    parent: torch.Tensor,
    mask_ordinal: torch.Tensor,
    depth: torch.Tensor,
    ancestors: torch.Tensor,
    probe: torch.Tensor,
    embedding: torch.Tensor,
    lam: float,
    budget: int,
    masks: int,
    widths: Sequence[int] | None = None,
    prune: bool = True,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Verify a block, draw the probe to what was committed, and put the next block in the place of this one.

    ids           [B, T, N] int32: each row's most probable tokens, best first, as topk_logprobs gives them;
                  N >= 1, and ids[..., 0] is the model's choice
    logprobs      [B, T, N] float32: their log-probabilities
    tokens        [B, T] int32, and likewise parent, mask_ordinal and depth: the block that was run, laid out
                  as expand_tree lays it out, then padding. Written IN PLACE
    ancestors     [B, T, ceil(T / 64)] int64. Written IN PLACE
    probe         [B, K, E] float32, K at least `masks`. Written IN PLACE
    embedding     [V, E] float32, bfloat16 or float16
    lam           the rate of update_probe, 0..1
    budget        rows that the next block may use, at most T; the rest of T is padding
    masks, widths, prune  as expand_tree takes them, of this block and of the next
    returns       path [B, T] and accepted [B] int32, as verify_tree gives them, and committed [B, T] int32:
                  the tokens decided, bonus last, then -1

    It is verify_tree, update_probe, expand_tree on the masks of the deepest accepted row, and tree_metadata,
    in one launch where there is a kernel for it. Without masks the next block is the bonus alone. A padded
    sequence (mask_ordinal[b, 0] = -1) stays one. Raises ValueError on shapes, dtypes, devices, strides or
    numbers that are not as above and, on the CPU, on choices outside the vocabulary and blocks laid out for
    another number of nodes.
    """
    run = _backend.select("advance_block", backend, ids, "ids")
    block = (tokens, parent, mask_ordinal, depth, ancestors)
    return run(ids, logprobs, *block, probe, embedding, lam, budget, masks, widths, prune)


def check(
    ids: torch.Tensor,
    logprobs: torch.Tensor,
    tokens: torch.Tensor,
    parent: torch.Tensor,
    mask_ordinal: torch.Tensor,
    depth: torch.Tensor,
    ancestors: torch.Tensor,
    probe: torch.Tensor,
    embedding: torch.Tensor,
    lam: float,
    budget: int,
    masks: int,
    widths: Sequence[int] | None = None,
    prune: bool = True,
) -> None:
    check_index(ids, "ids", ids, ANY, ANY, ANY)
    batch, rows, candidates = ids.shape
    require(candidates >= 1, f"ids must have at least 1 candidate a row, got {candidates}")
    check_device(logprobs, "logprobs", ids)
    check_dtype(logprobs, "logprobs", torch.float32)
    check_shape(logprobs, "logprobs", *ids.shape)
    check_contiguous(logprobs, "logprobs")
    check_index(tokens, "tokens", ids, batch, rows)
    check_index(parent, "parent", ids, batch, rows)
    check_index(mask_ordinal, "mask_ordinal", ids, batch, rows)
    check_index(depth, "depth", ids, batch, rows)
    check_device(ancestors, "ancestors", ids)
    check_dtype(ancestors, "ancestors", torch.int64)
    check_shape(ancestors, "ancestors", batch, rows, (rows + 63) // 64)
    check_contiguous(ancestors, "ancestors")
    check_embedding(embedding)
    check_device(embedding, "embedding", ids)
    check_probe(probe, embedding, batch)
    require(0 <= lam <= 1, f"lam must be in 0..1, got {lam:g}")
    require(1 <= budget <= rows, f"budget must be 1 to {rows}, the rows of the block, got {budget}")
    require(0 <= masks < budget, f"masks must be 0 to {budget - 1} with a budget of {budget}, got {masks}")
    vectors = probe.shape[1]
    require(vectors >= masks, f"probe must have a vector for each of {masks} masks, got {vectors}")
    if widths is not None:
        check_widths(widths, masks, budget, masks)
    if ids.device.type == "cpu":
        nodes = budget // (masks + 1) if widths is None else 1 + sum(widths)
        _check_values(ids, mask_ordinal, embedding.shape[0], nodes)


def cuda_refusal(ids: torch.Tensor, *_: object) -> str | None:
    """Its scratch lies in shared memory."""
    rows = ids.shape[1]
    return f"it takes at most 2048 rows, got {rows}; backend 'ref' has no limit" if rows > 2048 else None


def _check_values(ids: torch.Tensor, mask_ordinal: torch.Tensor, vocabulary: int, nodes: int) -> None:
    for b, (row, ordinals) in enumerate(zip(ids[..., 0].tolist(), mask_ordinal.tolist(), strict=True)):
        for r, (token, ordinal) in enumerate(zip(row, ordinals, strict=True)):
            require(
                -1 <= token < vocabulary,
                f"ids[{b}, {r}, 0] must be -1 or in the vocabulary of {vocabulary} tokens, got {token}",
            )
            require(
                ordinal != 0 or r < nodes,
                f"mask_ordinal[{b}, {r}] must not be 0, with {nodes} nodes tokens are rows 0..{nodes - 1}",
            )
