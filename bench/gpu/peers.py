"""What else attends to a tree behind a prefix: the same rows, the same cache, one call each."""

import torch
import torch.nn.functional as F

import esp_kernels
from bench.cases import Run, Size, esp_parents


def _inputs(size: Size) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v as [B, H, T, D] views of what tree_attention gets."""
    shape = size.shape
    q = torch.randn(size.batch, size.rows, shape.num_attention_heads, shape.head_dim).to(size.dtype)
    dims = (size.batch, size.prefix + size.rows, shape.num_key_value_heads, shape.head_dim)
    k, v = (torch.empty(dims, dtype=size.dtype).normal_() for _ in range(2))
    return tuple(x.transpose(1, 2) for x in (q, k, v))


def _among_rows(size: Size) -> torch.Tensor:
    """[T, T]: which row is an ancestor of which."""
    _, ancestors = esp_kernels.tree_metadata(esp_parents(size)[:1])
    row = torch.arange(size.rows)
    return (ancestors[0][:, row // 64] >> (row % 64) & 1).bool()


def _mask(size: Size) -> torch.Tensor:
    """[T, prefix + T]."""
    return F.pad(_among_rows(size), (size.prefix, 0), value=True)


def sdpa(size: Size) -> Run:
    q, k, v = _inputs(size)
    mask = _mask(size)
    return lambda: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def flex(size: Size) -> Run:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = _inputs(size)
    among, prefix = _among_rows(size), size.prefix

    def sees(b, h, row, key):
        return (key < prefix) | among[row, (key - prefix).clamp(0)]

    block_mask = create_block_mask(sees, None, None, size.rows, prefix + size.rows, device=q.device)
    attend = torch.compile(flex_attention, dynamic=False)
    return lambda: attend(q, k, v, block_mask=block_mask, enable_gqa=True)


def flashinfer(size: Size) -> Run:
    from flashinfer import single_prefill_with_kv_cache

    if size.batch > 1:
        raise ValueError("one sequence only")
    q, k, v = (x[0].transpose(0, 1) for x in _inputs(size))
    mask = _mask(size)
    return lambda: single_prefill_with_kv_cache(q, k, v, custom_mask=mask)


PEERS = (sdpa, flex, flashinfer)
