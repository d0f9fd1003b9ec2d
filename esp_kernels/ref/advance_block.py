from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from esp_kernels._block import PADDING
from esp_kernels.ref.expand_tree import expand_tree
from esp_kernels.ref.tree_metadata import tree_metadata
from esp_kernels.ref.update_probe import update_probe
from esp_kernels.ref.verify_tree import verify_tree


def advance_block(
    ids: torch.Tensor,
    logprobs: torch.Tensor,
    tokens: torch.Tensor,
    parent: torch.Tensor,
    mask_ordinal: torch.Tensor,
    depth: torch.Tensor,
    ancestors: torch.Tensor,
    probe: torch.Tensor,
    embedding: torch.Tensor,
    lam: float,
    budget: int,
    masks: int,
    widths: Sequence[int] | None = None,
    prune: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    choice = ids[..., 0].contiguous()
    path, accepted, bonus = verify_tree(choice, tokens, parent, mask_ordinal)
    committed = choice.gather(1, path.clamp(min=0).long()).masked_fill(path < 0, -1)
    update_probe(probe, embedding, committed, lam)

    nodes = budget // (masks + 1) if widths is None else 1 + sum(widths)
    deepest = path.gather(1, accepted.clamp(min=0)[:, None].long()).clamp(min=0)
    guesses = nodes + deepest * masks + torch.arange(masks, device=ids.device)
    rows = guesses.clamp(max=ids.shape[1] - 1)[..., None].expand(-1, -1, ids.shape[2])
    block = expand_tree(bonus, ids.gather(1, rows), logprobs.gather(1, rows), budget, masks, widths, prune)

    spare = (0, tokens.shape[1] - block[0].shape[1])
    for mine, new, padding in zip((tokens, parent, mask_ordinal), block, (-1, PADDING, -1), strict=True):
        mine.copy_(pad(new, spare, value=padding))
    new_depth, new_ancestors = tree_metadata(parent)
    depth.copy_(new_depth)
    ancestors.copy_(new_ancestors)
    return path, accepted, committed
