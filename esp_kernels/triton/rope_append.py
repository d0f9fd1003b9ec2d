import torch
import triton
import triton.language as tl


@triton.jit
def _turn(
    source, target, read, written, cos, sin, D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """One head a pointer of `source`, turned by the angles of a position."""
    j = tl.arange(0, BLOCK_HALF)
    turns = j < HALF
    c, s = tl.load(cos + j, mask=turns, other=0.0), tl.load(sin + j, mask=turns, other=0.0)
    from_low, to_low = source[:, None] + j[None, :], target[:, None] + j[None, :]
    low = tl.load(from_low, mask=read[:, None] & turns[None, :], other=0.0).to(tl.float32)
    high = tl.load(from_low + HALF, mask=read[:, None] & turns[None, :], other=0.0).to(tl.float32)
    dtype = target.dtype.element_ty
    tl.store(to_low, (low * c - high * s).to(dtype), mask=written[:, None] & turns[None, :])
    tl.store(to_low + HALF, (high * c + low * s).to(dtype), mask=written[:, None] & turns[None, :])
    if D > 2 * HALF:
        _copy(source + 2 * HALF, target + 2 * HALF, read, written, D - 2 * HALF, BLOCK_REST)


@triton.jit
def _copy(source, target, read, written, N: tl.constexpr, BLOCK_N: tl.constexpr):
    n = tl.arange(0, BLOCK_N)
    x = tl.load(source[:, None] + n[None, :], mask=read[:, None] & (n < N)[None, :], other=0.0)
    tl.store(target[:, None] + n[None, :], x, mask=written[:, None] & (n < N)[None, :])


# Bytes: q, k and v once and as much written; 8 * HALF of the tables for each HEADS heads of q and k.
# A program serves HEADS heads of one row: of q first, then of k and v.
@triton.jit(do_not_specialize=["rows", "positions", "pages", "page_size", "max_pages"])
def _rope_append_kernel(
    q, k, v, cos, sin, prefix_len, depth, k_cache, v_cache, block_table, y,
    rows, q_heads, kv_heads, positions, pages, page_size, max_pages,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    kc_page, kc_slot, kc_head, vc_page, vc_slot, vc_head,
    D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    one, part = tl.program_id(0), tl.program_id(1)
    b, row = (one // rows).to(tl.int64), one % rows
    prefix, own_depth = tl.load(prefix_len + b).to(tl.int64), tl.load(depth + one)
    position = prefix + own_depth
    real = (own_depth >= 0) & (position >= 0) & (position < positions)
    angles = tl.where(real, position, 0) * HALF
    cos += angles
    sin += angles

    q_parts = tl.cdiv(q_heads, HEADS)
    if part < q_parts:
        head = (part * HEADS + tl.arange(0, HEADS)).to(tl.int64)
        inside = head < q_heads
        source = q + b * q_batch + row.to(tl.int64) * q_row + head * q_head
        target = y + (one.to(tl.int64) * q_heads + head) * D
        _turn(source, target, inside & real, inside, cos, sin, D, HALF, BLOCK_HALF, BLOCK_REST)
    else:
        head = ((part - q_parts) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
        slot = prefix + row
        kept = real & (slot >= 0) & (slot < page_size * max_pages)
        slot = tl.where(kept, slot, 0).to(tl.int32)
        if block_table is None:
            page = b
        else:
            page = tl.load(block_table + b * max_pages + slot // page_size, mask=kept, other=0).to(tl.int64)
            kept = kept & (page >= 0) & (page < pages)
        offset = (slot % page_size).to(tl.int64)
        inside = kept & (head < kv_heads)
        source = k + b * k_batch + row.to(tl.int64) * k_row + head * k_head
        target = k_cache + page * kc_page + offset * kc_slot + head * kc_head
        _turn(source, target, inside, inside, cos, sin, D, HALF, BLOCK_HALF, BLOCK_REST)
        source = v + b * v_batch + row.to(tl.int64) * v_row + head * v_head
        target = v_cache + page * vc_page + offset * vc_slot + head * vc_head
        _copy(source, target, inside, inside, D, BLOCK_D)


def rope_append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    prefix_len: torch.Tensor,
    depth: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    batch, rows, q_heads, dim = q.shape
    kv_heads, (positions, half) = k.shape[2], cos.shape
    y = q.new_empty(q.shape)
    if batch * rows * dim == 0:
        return y
    pages, page_size = k_cache.shape[:2]
    max_pages = 1 if block_table is None else block_table.shape[1]
    blocks = [triton.next_power_of_2(max(n, 1)) for n in (dim, half, dim - 2 * half)]
    heads = max(1, 512 // blocks[1])
    strides = [stride for t in (q, k, v, k_cache, v_cache) for stride in t.stride()[:3]]
    grid = (batch * rows, triton.cdiv(q_heads, heads) + triton.cdiv(kv_heads, heads))
    _rope_append_kernel[grid](
        q, k, v, cos, sin, prefix_len, depth, k_cache, v_cache, block_table, y,
        rows, q_heads, kv_heads, positions, pages, page_size, max_pages, *strides,
        D=dim, HALF=half, HEADS=heads, BLOCK_D=blocks[0], BLOCK_HALF=blocks[1], BLOCK_REST=blocks[2],
        num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip
    return y
