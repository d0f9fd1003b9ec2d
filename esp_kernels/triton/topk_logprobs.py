"""Log-softmax and top-k in two launches: parts of the vocabulary, whose bounds depend on its size alone, then
each row's parts. A part stays in registers; its k best are sought among those of its columns, one a thread.
"""

import torch
import triton
import triton.language as tl

from esp_kernels.triton._rows import as_rows, pairwise_sum

PART_BYTES = 16384
COLUMNS = tl.constexpr(256)  # no less than the greatest k
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_logits(start, at, inside):
    """NaN counts as -inf, which a maximum takes for it, and both zeros are one logit, as -0 + 0 is 0."""
    logit = tl.load(start + at, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.maximum(logit, float("-inf")) + 0.0


@triton.jit
def _keys_of(logit, dtype: tl.constexpr, PART: tl.constexpr):
    """A part's candidates as integers: the larger the better, first by the logit, then by the lower place,
    which the low 16 bits hold inverted. A bfloat16 leaves those free."""
    bits = logit.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    place = 65535 - tl.arange(0, PART)
    return (ordered & -65536) | place if dtype == tl.bfloat16 else ordered.to(tl.int64) * 65536 + place


@triton.jit
def _best_of_columns(keys):
    return tl.max(tl.max(keys, 2), 0)


@triton.jit
def _next_of_columns(keys, best):
    lowest: tl.constexpr = -(1 << (keys.dtype.primitive_bitwidth - 1))
    return _best_of_columns(tl.where(keys < best[None, :, None], keys, lowest))


@triton.jit
def _best(keys, PART: tl.constexpr, VECTOR: tl.constexpr, K: tl.constexpr):
    """The K best keys, descending: among the columns' best, then among their second best, and so on for as
    long as one of these beats the worst of the K. Two or three rounds are usual, K the most there can be."""
    keys = tl.reshape(keys, [PART // (COLUMNS * VECTOR), COLUMNS, VECTOR])
    best = _best_of_columns(keys)
    top = tl.topk(best, K)
    best = _next_of_columns(keys, best)
    while tl.max(best, 0) > tl.min(top, 0):
        top = tl.sort(tl.maximum(top, tl.flip(tl.topk(best, K), 0)), descending=True)
        best = _next_of_columns(keys, best)
    return top


# Bytes: each logit once; 8 * K + 8 written for a part.
@triton.jit(do_not_specialize=["inner"])
def _topk_logprobs_part_kernel(
    logits, keys, highs, totals, inner, n, outer_stride, inner_stride,
    PART: tl.constexpr, VECTOR: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    start = logits + (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    at = part * PART + tl.arange(0, PART)
    logit = _load_logits(start, at, at < n)
    high = tl.max(logit, 0)
    shift = tl.where(tl.abs(high) == float("inf"), 0.0, high)
    total = pairwise_sum(tl.reshape(tl.exp2((logit - shift) * LOG2_E), [1, PART]))
    if high == float("inf"):
        total = tl.sum((tl.reshape(logit, [1, PART]) == high).to(tl.int32), 1).to(tl.float32)
    one = row.to(tl.int64) * tl.num_programs(1) + part
    tl.store(highs + one, high)
    tl.store(totals + one + tl.arange(0, 1), total)

    top = _best(_keys_of(logit, logits.dtype.element_ty, PART), PART, VECTOR, K).to(tl.int64)
    token = part * PART + (65535 - (top & 65535))
    tl.store(keys + one * K + tl.arange(0, K), ((top >> 16) << 32) + (0xFFFFFFFF - token))


@triton.jit
def _below(logit, highest):
    """logit - highest, also where both are the same infinity."""
    return tl.where(logit == highest, 0.0, logit - highest)


# Bytes: 8 * K + 8 for each part; 8 * k written.
@triton.jit(do_not_specialize=["inner", "k"])
def _topk_logprobs_merge_kernel(
    logits, keys, highs, totals, logprobs, ids, inner, k, outer_stride, inner_stride, parts,
    K: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start = logits + (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    part, candidate, rank = tl.arange(0, BLOCK_PARTS), tl.arange(0, BLOCK_PARTS * K), tl.arange(0, K)
    one = row.to(tl.int64) * parts
    high = tl.load(highs + one + part, mask=part < parts, other=float("-inf"))
    total = tl.load(totals + one + part, mask=part < parts, other=0.0)
    key = tl.load(keys + one * K + candidate, mask=candidate < parts * K, other=-(1 << 63))

    highest = tl.max(high, 0)
    shares = total * tl.exp2(_below(high, highest) * LOG2_E)
    log_total = tl.log(pairwise_sum(tl.reshape(shares, [1, BLOCK_PARTS])))
    token = 0xFFFFFFFF - (tl.topk(key, K) & 0xFFFFFFFF)
    logprob = _below(_load_logits(start, token, rank < k), highest) - log_total
    at = row.to(tl.int64) * k + rank
    tl.store(logprobs + at, tl.where(highest == float("-inf"), float("-inf"), logprob), mask=rank < k)
    tl.store(ids + at, token.to(tl.int32), mask=rank < k)


def topk_logprobs(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*logits.shape[:-1], k)
    logprobs = logits.new_empty(shape, dtype=torch.float32)
    ids = logits.new_empty(shape, dtype=torch.int32)
    if ids.numel() == 0:
        return logprobs, ids
    logits = as_rows(logits)
    outer, inner, n = logits.shape
    part = PART_BYTES // logits.element_size()
    rows, parts = outer * inner, triton.cdiv(n, part)
    candidates = max(2, triton.next_power_of_2(k))
    keys = logits.new_empty((rows, parts, candidates), dtype=torch.int64)
    highs, totals = logits.new_empty((2, rows, parts), dtype=torch.float32)

    strides = logits.stride()[:2]
    _topk_logprobs_part_kernel[rows, parts](
        logits, keys, highs, totals, inner, n, *strides,
        PART=part, VECTOR=16 // logits.element_size(), K=candidates, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    block = triton.next_power_of_2(parts)
    warps = min(max(block * candidates // 256, 1), 8)
    _topk_logprobs_merge_kernel[rows,](
        logits, keys, highs, totals, logprobs, ids, inner, k, *strides, parts,
        K=candidates, BLOCK_PARTS=block, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return logprobs, ids
