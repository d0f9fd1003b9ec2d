"""Attention of tree rows in two launches: the prefix that rows have in common, by matrix units and split over
positions; then the tail of each row, gathered in logical order, which takes in what the splits left.

What a row adds up, and in which order, follows from its position p = prefix_len + depth alone:

    keys below S(p) = floor16(p - DEEPEST)  in chunks of CHUNK; split i takes chunks i, i + SPLITS, ...
    keys from S(p) to p                     in one tile: rest of the prefix, ancestors by depth, itself

Down to depth DEEPEST the first S(p) keys lie in the prefix, whatever the tree, so a row gets the bits that
plain decoding would give it. The matrix part of a deeper row (of a long chain at prefill) ends with the
prefix, and its tail takes several tiles: neighbours do not change its bits either, but plain decoding may.

Rows of a matrix product do not mix, with one exception: a NaN or infinite value that one row still sees
through its window reaches rows of the same block whose windows have passed it, since 0 * NaN is NaN.
"""

import torch
import triton
import triton.language as tl

from esp_kernels.triton._device import capability, check_float8

SPLITS = tl.constexpr(16)
CHUNK = tl.constexpr(256)
DEEPEST = tl.constexpr(16)
TAIL = tl.constexpr(32)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tanh(x):
    """Odd polynomial near 0 (Cephes), where 1 - 2 / (e^2x + 1) would cancel."""
    y = x * x
    series = -5.70498872745e-3 * y + 2.06390887954e-2
    series = (series * y - 5.37397155531e-2) * y + 1.33314422036e-1
    near = x + x * y * (series * y - 3.33332819422e-1)
    far = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * 2.885390081777927) + 1.0)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def _cached(prefix_len, slots):
    """No launch knows what the lengths are: one beyond the cache must do no harm."""
    return tl.minimum(tl.maximum(tl.load(prefix_len), 0), slots)


@triton.jit
def _matrix_part(prefix, depth, window):
    """The positions [first, last) that the prefix kernel serves for rows at these depths."""
    position = prefix + depth
    last = tl.maximum(tl.minimum(position - DEEPEST, prefix), 0) // 16 * 16
    first = last * 0 if window is None else tl.maximum(position - window + 1, 0)
    return first, last


@triton.jit
def _place(slot, seen, sequence, block_table, max_pages, pages, PAGE: tl.constexpr):
    """Page and offset of each slot, and which lie in the cache; a dense one is one page a sequence."""
    if block_table is None:
        page, offset = sequence, slot
    else:
        page = tl.load(block_table + sequence * max_pages + slot // PAGE, mask=seen, other=0).to(tl.int64)
        offset = slot % PAGE
        seen = seen & (page >= 0) & (page < pages)
    return page, offset, seen


@triton.jit
def _load_rows(
    cache, page, offset, head, seen, page_stride, slot_stride, head_stride, D, BLOCK_D: tl.constexpr
):
    start = page * page_stride + offset.to(tl.int64) * slot_stride + head.to(tl.int64) * head_stride
    d = tl.arange(0, BLOCK_D)
    return tl.load(cache + start[:, None] + d[None, :], mask=seen[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _attend(q, k, v, visible, scale, softcap, top, total, acc):
    """One step of the online softmax, in powers of two. A row that sees nothing here keeps its bits."""
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
    if softcap is not None:
        scores = softcap * _tanh(scores)
    scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    fade = tl.exp2(top - shift)
    weights = tl.exp2(scores - shift[:, None])
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision="ieee")
    return higher, total, acc


# Reads 2 * prefix * D elements of K and V a KV head and tile of BM packed rows, and does 4 * prefix * D FLOPs
# a row and query head. Writes 4 * (D + 2) bytes a row, query head and split in use: one of each CHUNK
# positions of the prefix, at most SPLITS.
@triton.jit(do_not_specialize=["batch", "rows", "slots", "max_pages", "pages"])
def _tree_attention_prefix_kernel(
    q, k_cache, v_cache, prefix_len, ancestors, depth, block_table, k_scale, tops, totals, partial,
    batch, rows, kv_heads, slots, max_pages, pages,
    q_batch, q_row, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head,
    scale, window, softcap,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    b = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = tl.program_id(1) % kv_heads
    packed = tl.program_id(2) * BM + tl.arange(0, BM)
    row, head = packed // GROUP, kv_head * GROUP + packed % GROUP
    inside = row < rows

    words = (rows + 63) // 64
    own_word = tl.load(ancestors + (b * rows + row) * words + row // 64, mask=inside, other=0)
    real = (own_word >> (row % 64)) & 1 != 0
    first, last = _matrix_part(
        _cached(prefix_len + b, slots), tl.load(depth + b * rows + row, mask=inside, other=0), window
    )
    last = tl.where(real, last, 0)
    end = tl.max(tl.where(first < last, last, 0), 0)
    start = tl.min(tl.where(first < last, first, end), 0)

    # My chunks are those from `start` to `end` whose number is `split` modulo SPLITS.
    chunk = start // CHUNK + ((split - start // CHUNK) & (SPLITS - 1))
    if chunk * CHUNK >= end:
        return
    more = ((end - 1) // CHUNK - chunk) // SPLITS
    tiles = more * (CHUNK // BN) + tl.cdiv(tl.minimum(end - (chunk + more * SPLITS) * CHUNK, CHUNK), BN)

    d = tl.arange(0, BLOCK_D)
    stored = inside[:, None] & (d < D)[None, :]
    q_at = b * q_batch + row[:, None] * q_row + head[:, None] * q_head + d[None, :]
    queries = tl.load(q + q_at, mask=stored, other=0.0)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BLOCK_D], tl.float32)
    if k_scale is not None:
        scale *= tl.load(k_scale + kv_head)
    at = chunk * CHUNK
    for _ in range(tiles):
        slot = at + tl.arange(0, BN)
        seen = (slot >= start) & (slot < end)
        page, offset, seen = _place(slot, seen, b, block_table, max_pages, pages, PAGE)
        k = _load_rows(k_cache, page, offset, kv_head, seen, k_page, k_slot, k_head, D, BLOCK_D)
        v = _load_rows(v_cache, page, offset, kv_head, seen, v_page, v_slot, v_head, D, BLOCK_D)
        visible = slot[None, :] < last[:, None]
        if window is not None:
            visible = visible & (slot[None, :] >= first[:, None])
        top, total, acc = _attend(queries, k, v, visible, scale, softcap, top, total, acc)
        at += BN
        at += tl.where(at % CHUNK == 0, (SPLITS - 1) * CHUNK, 0)

    one = ((split * batch + b) * rows + row) * kv_heads * GROUP + head
    tl.store(tops + one, top, mask=inside)
    tl.store(totals + one, total, mask=inside)
    tl.store(partial + one[:, None] * D + d[None, :], acc, mask=stored)


@triton.jit
def _rows_at(wanted, ancestors, depth, words, rows):
    """The one of a row's ancestors that stands at each wanted depth, 0 where none does."""
    found = wanted * 0
    for word in range(words):
        row = word * 64 + tl.arange(0, 64)
        named = (tl.load(ancestors + word) >> tl.arange(0, 64)) & 1 != 0
        stands = tl.load(depth + row, mask=row < rows, other=-1)
        found += tl.sum(tl.where(named[None, :] & (stands[None, :] == wanted[:, None]), row[None, :], 0), 1)
    return found


# Reads 4 * (D + 2) bytes a row, query head and split in use. A key of the tail (17 to 32 of them down to
# depth DEEPEST) costs 2 * D elements a row and KV head, and 4 * D FLOPs a row and query head.
@triton.jit(do_not_specialize=["batch", "rows", "slots", "max_pages", "pages"])
def _tree_attention_tail_kernel(
    q, k_cache, v_cache, prefix_len, ancestors, depth, block_table, k_scale, v_scale, sinks,
    tops, totals, partial, out, lse,
    batch, rows, kv_heads, slots, max_pages, pages,
    q_batch, q_row, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head,
    scale, window, softcap,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    row, kv_head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    head, d = kv_head * GROUP + tl.arange(0, HEADS), tl.arange(0, BLOCK_D)
    inside = tl.arange(0, HEADS) < GROUP
    stored = inside[:, None] & (d < D)[None, :]
    one = (b * rows + row) * kv_heads * GROUP + head
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, BLOCK_D], tl.float32)

    own_ancestors = ancestors + (b * rows + row) * ((rows + 63) // 64)
    if (tl.load(own_ancestors + row // 64) >> (row % 64)) & 1 == 0:
        tl.store(lse + one, top, mask=inside)
        tl.store(out + one[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask=stored)
        return

    prefix = _cached(prefix_len + b, slots)
    own_depth = tl.load(depth + b * rows + row)
    first, last = _matrix_part(prefix, own_depth, window)
    chunk = first // CHUNK
    splits = tl.where(first < last, tl.minimum(tl.cdiv(last, CHUNK) - chunk, SPLITS), 0)
    for i in tl.range(splits, num_stages=4):
        split = ((chunk + i) % SPLITS).to(tl.int64)
        theirs = split * batch * rows * kv_heads * GROUP + one
        their_top = tl.load(tops + theirs, mask=inside, other=0.0)
        their_total = tl.load(totals + theirs, mask=inside, other=0.0)
        their_acc = tl.load(partial + theirs[:, None] * D + d[None, :], mask=stored, other=0.0)
        higher = tl.maximum(top, their_top)
        mine, other = tl.exp2(top - higher), tl.exp2(their_top - higher)
        total = total * mine + their_total * other
        acc = acc * mine[:, None] + their_acc * other[:, None]
        top = higher

    q_at = b * q_batch + row * q_row + head[:, None] * q_head + d[None, :]
    queries = tl.load(q + q_at, mask=stored, other=0.0)
    if k_scale is not None:
        scale *= tl.load(k_scale + kv_head)
    position = prefix + own_depth
    for at in range(last + tl.maximum(first - last, 0) // TAIL * TAIL, position + 1, TAIL):
        key = at + tl.arange(0, TAIL)
        seen = (key >= first) & (key <= position)
        block_row = _rows_at(key - prefix, own_ancestors, depth + b * rows, row // 64 + 1, rows)
        slot = tl.where(key < prefix, key, prefix + block_row)
        seen = seen & (slot < slots)
        page, offset, seen = _place(slot, seen, b, block_table, max_pages, pages, PAGE)
        k = _load_rows(k_cache, page, offset, kv_head, seen, k_page, k_slot, k_head, D, BLOCK_D)
        v = _load_rows(v_cache, page, offset, kv_head, seen, v_page, v_slot, v_head, D, BLOCK_D)
        top, total, acc = _attend(queries, k, v, seen[None, :], scale, softcap, top, total, acc)

    if sinks is not None:
        sink = tl.load(sinks + head, mask=inside, other=0.0) * LOG2_E
        higher = tl.maximum(top, sink)
        fade = tl.exp2(top - higher)
        total = total * fade + tl.exp2(sink - higher)
        acc = acc * fade[:, None]
        top = higher
    tl.store(lse + one, (top + tl.log2(total)) / LOG2_E, mask=inside)
    result = acc / total[:, None]
    if v_scale is not None:
        result *= tl.load(v_scale + kv_head)
    tl.store(out + one[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=stored)


def _tiles(dim: int, dtype: torch.dtype, packed_rows: int, hopper: bool) -> tuple[int, int, int]:
    """Rows and keys of a tile of the prefix, and warps. The number of rows may not change a row's bits, so it
    has a say only where tiles of both heights lay a row out alike: in Hopper's wgmma."""
    if dtype == torch.float32:
        return 32, 16, 8
    if dim > 128:
        return 64, 32, 8
    if not hopper:
        return 128, 32, 8
    return (64, 64, 4) if packed_rows <= 64 else (128, 64, 8)


def matrix_grid(
    batch: int, rows: int, q_heads: int, kv_heads: int, tile_rows: int = 64
) -> tuple[int, int, int]:
    """Programs over the prefix: splits, KV heads, tiles of rows packed with the query heads of a group."""
    return SPLITS.value, batch * kv_heads, triton.cdiv(rows * (q_heads // kv_heads), tile_rows)


def tree_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    prefix_len: torch.Tensor,
    ancestors: torch.Tensor,
    depth: torch.Tensor,
    block_table: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial results take 4 * SPLITS * (D + 2) bytes a row and query head of the block."""
    batch, rows, heads, dim = q.shape
    out = q.new_empty(q.shape)
    lse = q.new_empty((batch, rows, heads), dtype=torch.float32)
    if q.numel() == 0:
        return out, lse
    kv_heads = k_cache.shape[2]
    group = heads // kv_heads
    check_float8(k_cache, "k_cache")
    compute = capability(q)
    tile_rows, tile_keys, warps = _tiles(dim, q.dtype, rows * group, compute == (9, 0))
    tops, totals = lse.new_empty((2, SPLITS.value, batch, rows, heads))
    partial = lse.new_empty((SPLITS.value, batch, rows, heads, dim))

    scale = dim**-0.5 if scale is None else scale
    if softcap is None:
        scale *= LOG2_E.value
    else:
        scale, softcap = scale / softcap, softcap * LOG2_E.value
    window = None if window is None else min(window, 2**31 - 1)
    max_pages, page_size = (0, 1) if block_table is None else (block_table.shape[1], k_cache.shape[1])
    slots = k_cache.shape[1] if block_table is None else max_pages * page_size
    strides = (*q.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3])
    numbers = (batch, rows, kv_heads, slots, max_pages, k_cache.shape[0], *strides, scale, window, softcap)
    sizes = {"GROUP": group, "D": dim, "BLOCK_D": triton.next_power_of_2(dim), "PAGE": page_size}
    inputs = (q, k_cache, v_cache, prefix_len, ancestors, depth, block_table)

    # The compiler might contract the same sum in another way in the build for few rows than for many.
    options = {**sizes, "enable_fp_fusion": False}
    stages = 3 if block_table is None else 5  # pages are looked up two stages ahead
    _tree_attention_prefix_kernel[matrix_grid(batch, rows, heads, kv_heads, tile_rows)](
        *inputs, k_scale, tops, totals, partial, *numbers,
        BM=tile_rows, BN=tile_keys, num_warps=warps, num_stages=stages, **options,
    )  # fmt: skip
    heads_tile = max(16, triton.next_power_of_2(group))
    warps = 8 if q.dtype == torch.float32 and (dim > 64 or compute >= (9, 0)) else 4
    _tree_attention_tail_kernel[rows, kv_heads, batch](
        *inputs, k_scale, v_scale, sinks, tops, totals, partial, out, lse, *numbers,
        HEADS=heads_tile, num_warps=warps, num_stages=2, **options,
    )  # fmt: skip
    return out, lse
