"""Rotary position embedding by depth, with the block's K and V written to their cache slots."""

import torch

from esp_kernels import _backend
from esp_kernels._check import (
    ANY,
    check_contiguous,
    check_device,
    check_dtype,
    check_float,
    check_index,
    check_like,
    check_rows,
    check_scale,
    check_shape,
    check_slot,
    name_of,
    require,
)


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
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Rotate q and k for position prefix_len[b] + depth[b, r]; put row r's K and V in slot prefix_len[b] + r.

    q            [B, T, Hq, D] float32, bfloat16 or float16; any stride but in the last dimension
    k, v         [B, T, Hkv, D], q's dtype; strides as q's, so all three may be views of one projection
    cos, sin     [positions, R / 2] float32 contiguous, R <= D: the first R dimensions of a head rotate in the
                 half-split form (x[i], x[i + R / 2]), the others pass through
    prefix_len   [B] int32, cached positions of each sequence
    depth        [B, T] int32, distance of a row to the root; -1 for a padding row
    k_cache,     [B, S, Hkv, D], or pages [pages, page_size, Hkv, D] with a block_table; q's dtype, or
    v_cache      float8_e4m3fn (not on cpp); any stride but in the last dimension. Written IN PLACE
    block_table  [B, max_pages] int32: slot s is row s % page_size of page block_table[b, s // page_size]
    k_scale      [Hkv] float32, for float8_e4m3fn caches: k_cache * k_scale is the key, so the rotated k is
                 multiplied by 1 / k_scale in float32, and beyond 448 it becomes 448; None: 1
    v_scale      as k_scale, for values
    returns      [B, T, Hq, D] contiguous, q's dtype: the rotated q; the rotation is computed in float32 and
                 rounded once

    A padding row gives 0 and writes nothing; the prefix_len and pages of a sequence that has no other rows
    are not read. Sequences must not share a page that they write to. Raises ValueError on shapes, dtypes,
    devices or strides that are not as above and, on the CPU, on slots outside the cache, pages outside
    0..pages-1 and positions outside cos.
    """
    run = _backend.select("rope_append", backend, q, "q")
    return run(q, k, v, cos, sin, prefix_len, depth, k_cache, v_cache, block_table, k_scale, v_scale)


def check(
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
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    check_float(q, "q")
    check_shape(q, "q", ANY, ANY, ANY, ANY)
    check_rows(q, "q")
    batch, rows, _, n = q.shape
    check_like(k, "k", q, batch, rows, ANY, n)
    kv_heads = k.shape[2]
    check_like(v, "v", q, batch, rows, kv_heads, n)
    check_device(cos, "cos", q)
    check_dtype(cos, "cos", torch.float32)
    check_shape(cos, "cos", ANY, ANY)
    check_contiguous(cos, "cos")
    positions, half = cos.shape
    require(2 * half <= n, f"cos must have at most {n // 2} columns, half the head dimension, got {half}")
    check_device(sin, "sin", q)
    check_dtype(sin, "sin", torch.float32)
    check_shape(sin, "sin", positions, half)
    check_contiguous(sin, "sin")
    check_index(prefix_len, "prefix_len", q, batch)
    check_index(depth, "depth", q, batch, rows)
    check_device(k_cache, "k_cache", q)
    require(
        k_cache.dtype in (q.dtype, torch.float8_e4m3fn),
        f"k_cache must be {name_of(q.dtype)} or float8_e4m3fn, got {name_of(k_cache.dtype)}",
    )
    check_shape(k_cache, "k_cache", batch if block_table is None else ANY, ANY, kv_heads, n)
    check_rows(k_cache, "k_cache")
    check_like(v_cache, "v_cache", k_cache, k_cache.shape[0], k_cache.shape[1], kv_heads, n)
    if block_table is not None:
        check_index(block_table, "block_table", q, batch, ANY)
    check_scale(k_scale, "k_scale", k_cache)
    check_scale(v_scale, "v_scale", k_cache)
    if q.device.type != "cpu":
        return
    prefix = prefix_len.tolist()
    for b, depths in enumerate(depth.tolist()):
        for r, d in enumerate(depths):
            require(-1 <= d < rows, f"depth[{b}, {r}] must be in -1..{rows - 1}, got {d}")
            if d < 0:
                continue
            check_slot(k_cache, block_table, b, prefix[b], r)
            require(
                prefix[b] + d < positions,
                f"prefix_len[{b}] + depth[{b}, {r}] must be below the {positions} positions of cos, "
                f"got {prefix[b] + d}",
            )
