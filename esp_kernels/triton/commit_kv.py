"""All caches in one launch: a program moves one head of one sequence in one cache, row after row."""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

FIELDS = tl.constexpr(6)  # of a cache in the table: address, page, slot and head stride, heads, dim


# Bytes: each accepted row in and out, in every cache. A path only moves rows to lower slots, in order, and a
# program's elements are its own: none is overwritten before it has moved.
@triton.jit(do_not_specialize=["slots", "pages", "max_pages"])
def _commit_kv_kernel(
    table, like, path, accepted, prefix_len, block_table, rows, slots, pages, max_pages,
    PAGE: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2)
    entry = table + tl.program_id(0) * FIELDS
    address = tl.load(entry)
    page_stride, slot_stride, head_stride = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    d = tl.arange(0, BLOCK_D)
    inside = (d < tl.load(entry + 5)) & (head < tl.load(entry + 4))
    if ALIGNED:
        address, page_stride = tl.multiple_of(address, 16), tl.multiple_of(page_stride, 16)
        slot_stride, head_stride = tl.multiple_of(slot_stride, 16), tl.multiple_of(head_stride, 16)
    cache = address.to(tl.pointer_type(like.dtype.element_ty)) + head * head_stride
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
        row = tl.load(cache + source_page * page_stride + source_slot * slot_stride + d, mask=moved, other=0)
        tl.store(cache + target_page * page_stride + target_slot * slot_stride + d, row, mask=moved)


@functools.cache
def _table(device: torch.device, fields: tuple[int, ...]) -> torch.Tensor:
    """Kept for good: a CUDA graph reads it at every replay, and could not capture the copy to the device."""
    return torch.tensor(fields, dtype=torch.int64, device=device)


def commit_kv(
    caches: Sequence[torch.Tensor],
    path: torch.Tensor,
    accepted: torch.Tensor,
    prefix_len: torch.Tensor,
    block_table: torch.Tensor | None = None,
) -> None:
    batch, rows = path.shape
    if batch == 0 or rows == 0 or all(cache.numel() == 0 for cache in caches):
        return
    like = caches[0]
    fields = tuple(field for c in caches for field in (c.data_ptr(), *c.stride()[:3], c.shape[2], c.shape[3]))
    pages, page_size = like.shape[:2]
    max_pages = 1 if block_table is None else block_table.shape[1]
    step = 16 // like.element_size()
    aligned = all(c.data_ptr() % 16 == 0 and all(s % step == 0 for s in c.stride()[:3]) for c in caches)
    grid = (len(caches), batch, max(c.shape[2] for c in caches))
    _commit_kv_kernel[grid](
        _table(like.device, fields), like, path, accepted, prefix_len, block_table,
        rows, max_pages * page_size, pages, max_pages,
        PAGE=page_size, BLOCK_D=triton.next_power_of_2(max(c.shape[3] for c in caches)), ALIGNED=aligned,
        num_warps=1,
    )  # fmt: skip
