"""Ratios of sums over prompts, as tau and speed are, and how far they can be trusted."""

from collections.abc import Sequence

import torch

Pairs = Sequence[tuple[float, float]]
DRAWS = 1000


def ratio(pairs: Pairs) -> float:
    """The sum of the first over that of the second of each pair; 1.0 where that is 0: nothing was drafted."""
    below = sum(b for _, b in pairs)
    return sum(a for a, _ in pairs) / below if below else 1.0


def with_interval(pairs: Pairs) -> list[float]:
    """The ratio and its 95 % confidence interval, by the bootstrap over pairs: [ratio, low, high]."""
    drawn = torch.randint(len(pairs), (DRAWS, len(pairs)), generator=torch.Generator().manual_seed(0))
    above, below = torch.tensor(pairs, dtype=torch.float64).unbind(dim=1)
    above, below = above[drawn].sum(dim=1), below[drawn].sum(dim=1)
    ratios = torch.where(below > 0, above / below, 1.0)
    return [ratio(pairs), *torch.quantile(ratios, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()]
