"""The accepted rows of a block made contiguous in every cache."""

from collections.abc import Sequence

import torch

from esp_kernels import _backend
from esp_kernels._check import ANY, check_cache, check_index, check_like, check_shape, check_slot, require


def commit_kv(
    caches: Sequence[torch.Tensor],
    path: torch.Tensor,
    accepted: torch.Tensor,
    prefix_len: torch.Tensor,
    block_table: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> None:
    """Move slot prefix_len[b] + path[b, i] to slot prefix_len[b] + i, for i = 1..accepted[b], in every cache.

    caches       the K and V caches of all layers, each [B, S, H, D], or pages [pages, page_size, H, D] with
                 the one block_table; float32, bfloat16, float16 or float8_e4m3fn, all the same; H and D may
                 differ; any stride but in the last dimension. Written IN PLACE
    path         [B, N] int32: the accepted rows of the block, strictly increasing from path[b, 0] = 0, the
                 root, which is in place; entries past `accepted` are ignored
    accepted     [B] int32, accepted draft nodes; 0 or -1 (a padded sequence) moves nothing
    prefix_len   [B] int32, the slot of the root
    block_table  [B, max_pages] int32: slot s is row s % page_size of page block_table[b, s // page_size]

    No slot is overwritten before it has moved. Sequences must not share a page that they write to. Raises
    ValueError on shapes, dtypes, devices or strides that are not as above and, on the CPU, on a path that
    does not increase, slots outside the cache and pages outside 0..pages-1.
    """
    _backend.select("commit_kv", backend, path, "path")(caches, path, accepted, prefix_len, block_table)


def check(
    caches: Sequence[torch.Tensor],
    path: torch.Tensor,
    accepted: torch.Tensor,
    prefix_len: torch.Tensor,
    block_table: torch.Tensor | None = None,
) -> None:
    require(len(caches) > 0, "caches must hold at least one tensor, got 0")
    first = caches[0]
    check_cache(first, "caches[0]")
    check_shape(first, "caches[0]", ANY, ANY, ANY, ANY)
    for i, cache in enumerate(caches):
        check_like(cache, f"caches[{i}]", first, first.shape[0], first.shape[1], ANY, ANY)
    check_index(path, "path", first, first.shape[0] if block_table is None else ANY, ANY)
    batch, length = path.shape
    check_index(accepted, "accepted", first, batch)
    check_index(prefix_len, "prefix_len", first, batch)
    if block_table is not None:
        check_index(block_table, "block_table", first, batch, ANY)
    if first.device.type != "cpu":
        return
    prefix, rows = prefix_len.tolist(), path.tolist()
    for b, count in enumerate(accepted.tolist()):
        require(-1 <= count < length, f"accepted[{b}] must be in -1..{length - 1}, got {count}")
        if count < 1:
            continue
        row = rows[b]
        require(row[0] == 0, f"path[{b}, 0] must be 0, the root, got {row[0]}")
        for i in range(1, count + 1):
            require(
                row[i] > row[i - 1],
                f"path[{b}, {i}] must be above path[{b}, {i - 1}] = {row[i - 1]}, got {row[i]}",
            )
            check_slot(first, block_table, b, prefix[b], i)
            check_slot(first, block_table, b, prefix[b], row[i])
