"""Inputs and error budgets for tests of these ops, and of engines that use them."""

import random
from collections.abc import Sequence

import torch

from esp_kernels._block import PADDING, ROOT


def assert_as_accurate(
    actual: torch.Tensor,
    exact: torch.Tensor,
    baseline: torch.Tensor,
    factor: float = 2.0,
    least: float = 0.0,
) -> None:
    """The error of `actual` against the float64 `exact` is at most `factor` times the error of `baseline`
    (PyTorch's own result at the same precision; counted as `least`, where it may be small by luck), plus one
    unit in the last place of the largest value."""
    assert actual.shape == exact.shape, f"shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    finite = exact.isfinite()
    assert torch.equal(actual.double()[~finite], exact[~finite]), "infinities differ"
    if not finite.any():
        return
    error = (actual.double() - exact)[finite].abs().max().item()
    own = max(least, (baseline.double() - exact)[finite].abs().max().item())
    ulp = torch.finfo(actual.dtype).eps * exact[finite].abs().max().item()
    assert error <= factor * own + ulp, f"error {error:.3g}, PyTorch's own {own:.3g}, one ulp {ulp:.3g}"


def random_tree(rows: int, rng: random.Random, padding: int = 0, reach: int | None = None) -> list[int]:
    """A `parent` row: node 0 is the root, every other hangs from one of the `reach` rows before it, and
    `padding` rows in random places (never row 0) belong to no tree."""
    padded = set(rng.sample(range(1, rows), padding)) if padding else set()
    parent = [ROOT]
    for r in range(1, rows):
        earlier = [j for j in range(max(0, r - (reach or rows)), r) if j not in padded] or [0]
        parent.append(PADDING if r in padded else rng.choice(earlier))
    return parent


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """NaN in floating tensors, the lowest value in integer ones: reads of what was never written show."""
    if dtype.is_floating_point:
        return torch.full(tuple(shape), torch.nan, dtype=dtype)
    return torch.full(tuple(shape), torch.iinfo(dtype).min, dtype=dtype)


def strided(t: torch.Tensor, gap: int = 3) -> torch.Tensor:
    """The same values with poisoned gaps after each row of the last dimension, which stays dense."""
    wide = poisoned((*t.shape[:-1], t.shape[-1] + gap), t.dtype)
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


def paged(cache: torch.Tensor, page_size: int, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """A dense [B, S, H, D] cache as shuffled pages [pages, page_size, H, D] (some of them unused and
    poisoned) and its int32 block_table [B, ceil(S / page_size)]."""
    batch, slots = cache.shape[:2]
    per_sequence = -(-slots // page_size)
    pages = poisoned((batch * per_sequence + 2, page_size, *cache.shape[2:]), cache.dtype)
    order = rng.sample(range(pages.shape[0]), batch * per_sequence)
    table = torch.tensor(order, dtype=torch.int32).view(batch, per_sequence)
    for b in range(batch):
        for s in range(slots):
            pages[table[b, s // page_size], s % page_size] = cache[b, s]
    return pages, table


def unpaged(pages: torch.Tensor, block_table: torch.Tensor, slots: int) -> torch.Tensor:
    """The inverse of `paged`."""
    dense = pages[block_table.long()].flatten(1, 2)
    return dense[:, :slots]
