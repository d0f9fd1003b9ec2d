"""Four launches: the walk, the probe, the next tree in the place of this one, its depths and ancestors."""

from collections.abc import Sequence

import torch

from esp_kernels.triton import expand_tree, tree_metadata, verify_tree
from esp_kernels.triton.update_probe import update_probe


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
    committed = torch.empty_like(tokens)
    path, accepted, bonus = verify_tree.launch(ids, ids.shape[2], tokens, parent, mask_ordinal, committed)
    update_probe(probe, embedding, committed, lam)
    nodes = budget // (masks + 1) if widths is None else 1 + sum(widths)
    block = (tokens, parent, mask_ordinal)
    expand_tree.launch(bonus, ids, logprobs, block, masks, nodes, masks, widths, prune, path, accepted)
    tree_metadata.launch(parent, depth, ancestors)
    return path, accepted, committed
