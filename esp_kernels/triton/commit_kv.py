"""Caches of one layout in one launch: a program moves some heads of a sequence in a cache, row after row."""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

BYTES = 1024  # of a row that a program moves: 16 a thread of AMD's warps of 64, 32 of NVIDIA's


# Bytes: each accepted row in and out, in every cache. A path only moves rows to lower slots, in order, and a
# program's elements are its own: none is overwritten before it has moved.
@triton.jit(do_not_specialize=["rows", "slots", "pages", "max_pages", "heads"])
def _commit_kv_kernel(
    addresses, like, path, accepted, prefix_len, block_table, rows, slots, pages, max_pages,
    heads, page_stride, slot_stride, head_stride,
    PAGE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    head, d = tl.program_id(2) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK_D)
    inside = (head < heads)[:, None] & (d < D)[None, :]
    cache = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(like.dtype.element_ty))
    if ALIGNED:
        cache = tl.multiple_of(cache, 16)
    mine = head.to(tl.int64)[:, None] * head_stride + d[None, :]
    prefix = tl.load(prefix_len + b)
    moves = tl.minimum(tl.load(accepted + b), rows - 1)
    for i in range(1, moves + 1):
        source, target = prefix + tl.load(path + b * rows + i), prefix + i
        # What does not lie in the cache stays where it is.
        held = (target >= 0) & (target < source) & (source < slots)
        if block_table is None:
            source_page, target_page = b, b
            source_slot, target_slot = source, target
        else:
            pages_of = block_table + b * max_pages
            source_page = tl.load(pages_of + source // PAGE, mask=held, other=0).to(tl.int64)
            target_page = tl.load(pages_of + target // PAGE, mask=held, other=0).to(tl.int64)
            held = held & (source_page >= 0) & (source_page < pages)
            held = held & (target_page >= 0) & (target_page < pages)
            source_slot, target_slot = source % PAGE, target % PAGE
        moved = inside & held
        from_ = cache + source_page * page_stride + source_slot.to(tl.int64) * slot_stride + mine
        to = cache + target_page * page_stride + target_slot.to(tl.int64) * slot_stride + mine
        tl.store(to, tl.load(from_, mask=moved, other=0), mask=moved)


@functools.cache
def _table(device: torch.device, addresses: tuple[int, ...]) -> torch.Tensor:
    """Kept for good: a CUDA graph reads it at every replay, and could not capture the copy to the device."""
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def commit_kv(
    caches: Sequence[torch.Tensor],
    path: torch.Tensor,
    accepted: torch.Tensor,
    prefix_len: torch.Tensor,
    block_table: torch.Tensor | None = None,
) -> None:
    """One launch for all caches of one shape and strides: K and V of all layers, as a rule."""
    layouts: dict[tuple[torch.Size, tuple[int, ...]], list[torch.Tensor]] = {}
    for cache in caches:
        layouts.setdefault((cache.shape, cache.stride()), []).append(cache)
    for alike in layouts.values():
        _launch(alike, path, accepted, prefix_len, block_table)


def _launch(
    caches: list[torch.Tensor],
    path: torch.Tensor,
    accepted: torch.Tensor,
    prefix_len: torch.Tensor,
    block_table: torch.Tensor | None,
) -> None:
    batch, rows = path.shape
    like = caches[0]
    if batch == 0 or rows == 0 or like.numel() == 0:
        return
    if like.dtype == torch.float8_e4m3fn:  # which not every card computes in, but all can move
        like = like.view(torch.uint8)
    pages, page_size, kv_heads, dim = like.shape
    max_pages = 1 if block_table is None else block_table.shape[1]
    addresses = tuple(cache.data_ptr() for cache in caches)
    block_d = triton.next_power_of_2(dim)
    heads = max(1, BYTES // (block_d * like.element_size()))
    _commit_kv_kernel[len(caches), batch, triton.cdiv(kv_heads, heads)](
        _table(like.device, addresses), like, path, accepted, prefix_len, block_table,
        rows, max_pages * page_size, pages, max_pages, kv_heads, *like.stride()[:3],
        PAGE=page_size, HEADS=heads, D=dim, BLOCK_D=block_d,
        ALIGNED=all(address % 16 == 0 for address in addresses), num_warps=1,
    )  # fmt: skip
