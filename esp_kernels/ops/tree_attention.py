"""Attention of a tree of block rows over a cached prefix and over their own ancestors."""

import math

import torch

from esp_kernels import _backend
from esp_kernels._check import (
    ANY,
    check_contiguous,
    check_device,
    check_dtype,
    check_float,
    check_index,
    check_rows,
    check_scale,
    check_shape,
    name_of,
    require,
)


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
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row attends to the whole prefix, its ancestors in the block and itself.

    q            [B, T, Hq, D] float32, bfloat16 or float16; D a multiple of 16 up to 256
    k_cache      [B, S, Hkv, D], or pages [pages, page_size, Hkv, D] with a block_table; q's dtype, or
                 float8_e4m3fn (on ref and triton); query head h reads KV head h // (Hq / Hkv)
    v_cache      as k_cache
    prefix_len   [B] int32: slots 0 .. prefix_len - 1 hold the prefix, slot prefix_len + r block row r
    ancestors    [B, T, ceil(T / 64)] int64: bit j % 64 of word j / 64 is set when row j is row r or an
                 ancestor of r; a padding row has none
    depth        [B, T] int32: row r stands at position prefix_len + depth[r]; -1 for padding
    block_table  [B, max_pages] int32: slot s is page block_table[b, s // page_size], offset s % page_size
    scale        of q . k; None: D ** -0.5
    window       a row sees only positions above its own - window
    softcap      scores s become softcap * tanh(s / softcap)
    sinks        [Hq] float32: a logit without a value that joins each head's softmax
    k_scale      [Hkv] float32, for float8_e4m3fn caches: keys are k_cache * k_scale; None: 1
    v_scale      as k_scale, for values
    returns      out [B, T, Hq, D] contiguous, q's dtype, and lse [B, T, Hq] float32, the natural log of the
                 softmax's denominator, sinks included; padding rows give 0 and -inf

    q and the caches may have any stride but in the last dimension; index tensors are contiguous. Sums are
    taken in float32 and rounded once. A row's result depends on nothing but its own q and the keys that it
    sees in the order of their positions: not on T, B, the other rows, pages, strides or threads, and not on
    whether an ancestor is still in the block or in the prefix by now (on triton and cuda down to a depth of
    16). Slots that no row sees are not used, so they may hold anything. Backend 'cuda' takes bfloat16 and
    float16 on Hopper, at multiples of 16 bytes.
    Raises ValueError on shapes, dtypes, devices or strides that are not as above; on the CPU also on
    prefix_len or pages out of range, and on ancestors that are not one row of each depth.
    """
    return _backend.select("tree_attention", backend, q, "q")(
        q, k_cache, v_cache, prefix_len, ancestors, depth, block_table,
        scale, window, softcap, sinks, k_scale, v_scale,
    )  # fmt: skip


def check(
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
) -> None:
    check_float(q, "q")
    check_shape(q, "q", ANY, ANY, ANY, ANY)
    check_rows(q, "q")
    batch, rows, heads, dim = q.shape
    require(
        dim % 16 == 0 and 16 <= dim <= 256,
        f"q must have a head dimension that is a multiple of 16 up to 256, got {dim}",
    )
    check_device(k_cache, "k_cache", q)
    require(
        k_cache.dtype in (q.dtype, torch.float8_e4m3fn),
        f"k_cache must be {name_of(q.dtype)} or float8_e4m3fn, got {name_of(k_cache.dtype)}",
    )
    check_shape(k_cache, "k_cache", batch if block_table is None else ANY, ANY, ANY, dim)
    check_rows(k_cache, "k_cache")
    pages, page_size, kv_heads = k_cache.shape[:3]
    require(
        kv_heads > 0 and heads % kv_heads == 0,
        f"q must have a multiple of k_cache's {kv_heads} heads, got {heads}",
    )
    check_device(v_cache, "v_cache", q)
    check_dtype(v_cache, "v_cache", k_cache.dtype)
    check_shape(v_cache, "v_cache", *k_cache.shape)
    check_rows(v_cache, "v_cache")
    if block_table is not None:
        check_index(block_table, "block_table", q, batch, ANY)
    check_index(prefix_len, "prefix_len", q, batch)
    check_device(ancestors, "ancestors", q)
    check_dtype(ancestors, "ancestors", torch.int64)
    check_shape(ancestors, "ancestors", batch, rows, (rows + 63) // 64)
    check_contiguous(ancestors, "ancestors")
    check_index(depth, "depth", q, batch, rows)
    if scale is not None:
        require(scale > 0 and math.isfinite(scale), f"scale must be positive and finite, got {scale:g}")
    if window is not None:
        require(window >= 1, f"window must be at least 1, got {window}")
    if softcap is not None:
        require(
            softcap > 0 and math.isfinite(softcap), f"softcap must be positive and finite, got {softcap:g}"
        )
    if sinks is not None:
        check_device(sinks, "sinks", q)
        check_dtype(sinks, "sinks", torch.float32)
        check_shape(sinks, "sinks", heads)
        check_contiguous(sinks, "sinks")
    check_scale(k_scale, "k_scale", k_cache)
    check_scale(v_scale, "v_scale", k_cache)
    if q.device.type == "cpu":
        _check_tree(ancestors, depth)
        _check_slots(prefix_len, block_table, pages, page_size, rows)


def cuda_refusal(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *_: object) -> str | None:
    """Its matrix instructions are Hopper's, and it copies 16 bytes at a time. Triton's takes the rest."""
    if q.dtype == torch.float32:
        return "it takes bfloat16 and float16, got float32; backend 'triton' takes it"
    if k_cache.dtype != q.dtype:
        return f"it reads caches of q's dtype, got {name_of(k_cache.dtype)}; backend 'triton' reads it"
    if q.is_cuda and torch.cuda.get_device_capability(q.device) != (9, 0):
        got = "{}.{}".format(*torch.cuda.get_device_capability(q.device))
        return f"it needs compute capability 9.0, got {got}; backend 'triton' runs there"
    for name, t in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        steps = [stride for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True) if size > 1]
        if any(step % 8 for step in steps):
            return (
                f"{name} must have strides of multiples of 16 bytes, got strides {list(t.stride())}; "
                "backend 'triton' takes any"
            )
        if t.data_ptr() % 16:
            return f"{name} must start at a multiple of 16 bytes; backend 'triton' takes any start"
    return None


def _check_tree(ancestors: torch.Tensor, depth: torch.Tensor) -> None:
    """A row names one row of each depth 0, 1, ... in order, itself last; or none."""
    rows = depth.shape[1]
    for b, (words, depths) in enumerate(zip(ancestors.tolist(), depth.tolist(), strict=True)):
        for r in range(rows):
            require(-1 <= depths[r] < rows, f"depth[{b}, {r}] must lie in -1..{rows - 1}, got {depths[r]}")
            bits = [w * 64 + i for w, word in enumerate(words[r]) for i in range(64) if word >> i & 1]
            after = next((j for j in bits if j > r), None)
            require(after is None, f"ancestors[{b}, {r}] names row {after}, after {r}")
            require(
                not bits or (bits[-1] == r and [depths[j] for j in bits] == list(range(len(bits)))),
                f"ancestors[{b}, {r}] must name one row of each depth 0, 1, ... up to row {r}, or none",
            )


def _check_slots(
    prefix_len: torch.Tensor, block_table: torch.Tensor | None, pages: int, page_size: int, rows: int
) -> None:
    capacity = page_size * (1 if block_table is None else block_table.shape[1])
    for b, prefix in enumerate(prefix_len.tolist()):
        require(
            0 <= prefix <= capacity - rows,
            f"prefix_len[{b}] must lie in 0..{capacity - rows} ({capacity} slots, {rows} block rows), "
            f"got {prefix}",
        )
        if block_table is None:
            continue
        for i, page in enumerate(block_table[b, : -(-(prefix + rows) // page_size)].tolist()):
            require(0 <= page < pages, f"block_table[{b}, {i}] must lie in 0..{pages - 1}, got {page}")
