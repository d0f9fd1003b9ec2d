import torch

from esp_kernels.ref._slots import locate


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [rows, heads, D] turned by the angles of cos and sin [rows, R / 2], in float32."""
    half = cos.shape[1]
    low, high, rest = x.float().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1)


def stored(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Float32 rows [rows, heads, D] as a cache of this dtype holds them."""
    x = x if scale is None else x * (1 / scale)[:, None]
    if dtype == torch.float8_e4m3fn:
        x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return x.to(dtype)


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
) -> torch.Tensor:
    b, r = (depth >= 0).nonzero(as_tuple=True)
    position = prefix_len[b] + depth[b, r]
    cos, sin = cos[position], sin[position]
    page, offset = locate(b, prefix_len[b] + r, k_cache, block_table)
    k_cache[page, offset] = stored(rotate(k[b, r], cos, sin), k_scale, k_cache.dtype)
    v_cache[page, offset] = stored(v[b, r].float(), v_scale, v_cache.dtype)
    rotated = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    rotated[b, r] = rotate(q[b, r], cos, sin).to(q.dtype)
    return rotated
