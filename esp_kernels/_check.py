"""Argument checks of the backends written in Python; csrc/check.h has the same sentences."""

from collections.abc import Sequence

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ANY = -1


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(dims: Sequence[int]) -> str:
    return "[" + ", ".join("*" if d == ANY else str(d) for d in dims) + "]"


def check_shape(t: torch.Tensor, name: str, *dims: int) -> None:
    same = t.dim() == len(dims) and all(d in (ANY, size) for d, size in zip(dims, t.shape, strict=True))
    require(same, f"{name} must have shape {_listed(dims)}, got {_listed(t.shape)}")


def check_dtype(t: torch.Tensor, name: str, dtype: torch.dtype) -> None:
    require(t.dtype == dtype, f"{name} must be {name_of(dtype)}, got {name_of(t.dtype)}")


def check_float(t: torch.Tensor, name: str) -> None:
    require(t.dtype in FLOATS, f"{name} must be float32, bfloat16 or float16, got {name_of(t.dtype)}")


def check_cache(t: torch.Tensor, name: str) -> None:
    require(
        t.dtype in (*FLOATS, torch.float8_e4m3fn),
        f"{name} must be float32, bfloat16, float16 or float8_e4m3fn, got {name_of(t.dtype)}",
    )


def check_device(t: torch.Tensor, name: str, like: torch.Tensor) -> None:
    require(t.device == like.device, f"{name} must be on {like.device}, got {t.device}")


def check_contiguous(t: torch.Tensor, name: str) -> None:
    require(t.is_contiguous(), f"{name} must be contiguous, got strides {_listed(t.stride())}")


def check_rows(t: torch.Tensor, name: str) -> None:
    """The last dimension must be dense; the others may have any stride."""
    require(
        t.size(-1) <= 1 or t.stride(-1) == 1,
        f"{name} must have stride 1 in its last dimension, got strides {_listed(t.stride())}",
    )


def check_index(t: torch.Tensor, name: str, like: torch.Tensor, *dims: int) -> None:
    """An int32 tensor on the device of `like`, contiguous."""
    check_device(t, name, like)
    check_dtype(t, name, torch.int32)
    check_shape(t, name, *dims)
    check_contiguous(t, name)


def check_like(t: torch.Tensor, name: str, like: torch.Tensor, *dims: int) -> None:
    """Dense rows on the device of `like`, of its dtype."""
    check_device(t, name, like)
    check_dtype(t, name, like.dtype)
    check_shape(t, name, *dims)
    check_rows(t, name)


def check_scale(scale: torch.Tensor | None, name: str, cache: torch.Tensor) -> None:
    """Float32 factors of a float8_e4m3fn cache [..., Hkv, D], one a head, or none."""
    if scale is None:
        return
    require(
        cache.dtype == torch.float8_e4m3fn,
        f"{name} goes with float8_e4m3fn caches, got {name_of(cache.dtype)}",
    )
    check_device(scale, name, cache)
    check_dtype(scale, name, torch.float32)
    check_shape(scale, name, cache.shape[2])
    check_contiguous(scale, name)


def check_slot(cache: torch.Tensor, block_table: torch.Tensor | None, b: int, prefix: int, row: int) -> None:
    """Row `row` of sequence b's block has a slot in the dense or paged `cache`."""
    pages, page_size = cache.shape[:2]
    capacity = page_size if block_table is None else page_size * block_table.shape[1]
    slot = prefix + row
    require(prefix >= 0, f"prefix_len[{b}] must be at least 0, got {prefix}")
    require(
        slot < capacity,
        f"prefix_len[{b}] + row {row} must be below the capacity of {capacity} slots, got {slot}",
    )
    if block_table is not None:
        page = int(block_table[b, slot // page_size])
        require(
            0 <= page < pages,
            f"block_table[{b}, {slot // page_size}] must be in 0..{pages - 1}, got {page}",
        )
