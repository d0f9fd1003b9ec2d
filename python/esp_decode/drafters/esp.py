"""Embedding-space probing: the tree comes from the masks of the deepest accepted row (paper, Section 3)."""

import torch

import esp_kernels
from esp_decode.model import Model
from esp_decode.probe import initial_probe, update_probe
from esp_decode.tree import Block, TreeShape


class EspDrafter:
    def __init__(
        self, model: Model, prompt: torch.Tensor, shape: TreeShape, probe: str, lam: float, prune: bool
    ):
        self.masks = shape.masks
        self.rows = shape.rows
        self.probe = initial_probe(probe, model, prompt, shape.masks)
        self._model = model
        self._shape = shape
        self._lam = lam
        self._prune = prune
        widest = max(shape.widths) if shape.widths else shape.nodes - 1
        self._candidates = min(widest + prune, model.vocab_size)
        self._structure: tuple[torch.Tensor, torch.Tensor] | None = None

    def draft(self, root: torch.Tensor, committed: torch.Tensor, mask_logits: torch.Tensor) -> Block:
        update_probe(self.probe, self._model, committed, self._lam)
        logprobs, ids = esp_kernels.topk_logprobs(mask_logits, self._candidates)
        shape = self._shape
        tokens, parent, ordinal = esp_kernels.expand_tree(
            root, ids, logprobs, shape.budget, shape.masks, shape.widths, self._prune
        )
        return Block(tokens, parent, ordinal, *self._metadata(parent))

    def _metadata(self, parent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Depths and ancestor bits; those of a static tree are built once."""
        if self._shape.widths is None:
            return esp_kernels.tree_metadata(parent)
        if self._structure is None:
            self._structure = esp_kernels.tree_metadata(parent)
        return self._structure
