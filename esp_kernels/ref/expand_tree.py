from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from esp_kernels._block import PADDING, ROOT


def expand_tree(
    root: torch.Tensor,
    ids: torch.Tensor,
    logprobs: torch.Tensor,
    budget: int,
    masks: int,
    widths: Sequence[int] | None = None,
    prune: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    nodes = budget // (masks + 1) if widths is None else 1 + sum(widths)
    # An empty level holds one candidate that is never drafted.
    empty = (0, int(ids.shape[2] == 0), 0, int(ids.shape[1] == 0))
    ids, logprobs = pad(ids, empty, value=-1), pad(logprobs, empty)
    levels, candidates = ids.shape[1:]
    gain = logprobs.clamp(max=0).where((ids >= 0) & logprobs.isfinite(), -torch.inf)
    keeps = range(nodes - 1, max(0, nodes - 1 - levels), -1) if widths is None else widths

    # The nodes kept level by level, each level in order. One with score -inf is padding.
    token = root[:, None]
    score = torch.zeros_like(token, dtype=torch.float32).masked_fill(token < 0, -torch.inf)
    above = torch.full_like(token, ROOT, dtype=torch.int64)
    tree = [(token, score, above)]
    first = 0
    for level, keep in enumerate(keeps):
        if widths is not None:
            token, score = token[:, :1], score[:, :1]
        child = score[:, :, None] + gain[:, None, level]
        if prune:
            child = child.masked_fill(ids[:, None, level] == token[:, :, None], -torch.inf)
        child = child.flatten(1)
        best = pad(child, (0, keep), value=-torch.inf).sort(dim=1, descending=True, stable=True)
        chosen = best.indices[:, :keep].clamp(max=child.shape[1] - 1)
        above = first + chosen // candidates
        first += tree[-1][0].shape[1]
        token, score = ids[:, level].gather(1, chosen % candidates), best.values[:, :keep]
        tree.append((token, score, above))

    token, score, above = (torch.cat(parts, 1) for parts in zip(*tree, strict=True))
    place = torch.arange(score.shape[1], device=root.device).expand_as(score)
    order = place if widths is not None else score.argsort(dim=1, descending=True, stable=True)
    row = torch.zeros_like(order).scatter_(1, order, place)
    order = order[:, :nodes]
    parent = row.gather(1, above.clamp(min=0)).gather(1, order)
    parent[:, 0] = ROOT
    real = score.gather(1, order) > -torch.inf
    return _with_masks(token.gather(1, order), parent, real, masks)


def _with_masks(
    token: torch.Tensor, parent: torch.Tensor, real: torch.Tensor, masks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    nodes, owner = token.shape[1], torch.arange(token.shape[1], device=token.device)
    ordinal = torch.arange(1, masks + 1, device=token.device).repeat(nodes)
    before = nodes - 1 + torch.arange(nodes * masks, device=token.device)
    before = torch.where(ordinal == 1, owner.repeat_interleave(masks), before)
    token = pad(token, (0, nodes * masks), value=-1)
    parent = torch.cat([parent, before.expand(len(parent), -1)], 1)
    ordinal = pad(ordinal, (nodes, 0))
    real = torch.cat([real, real.repeat_interleave(masks, 1)], 1)
    return (
        torch.where(real, token, -1).int(),
        torch.where(real, parent, PADDING).int(),
        torch.where(real, ordinal, -1).int(),
    )
