"""Embedding-space probing: the tree comes from the masks of the deepest accepted row (paper, Section 3)."""

from dataclasses import dataclass

import torch

import esp_kernels
from esp_decode.drafters.base import Draft, Outcome, Verdict
from esp_decode.model import Model
from esp_decode.probe import Probe
from esp_decode.tree import TreeShape, empty_block, with_metadata


@dataclass(frozen=True)
class EspDrafter:
    """A tree of one row without masks is plain decoding."""

    model: Model
    shape: TreeShape
    rows: int
    probe: Probe
    prune: bool
    on_device: bool = True

    @property
    def candidates(self) -> int:
        return min(self.shape.widest + self.prune, self.model.vocab_size)

    def new_draft(self, batch: int, capacity: int) -> Draft:
        width, device = self.model.embedding.shape[1], self.model.device
        probe = torch.empty((batch, self.shape.masks, width), dtype=torch.float32, device=device)
        return Draft(empty_block(batch, self.rows, device), probe)

    def start(self, prompt: torch.Tensor, draft: Draft) -> None:
        shape = self.shape
        nothing = prompt.new_empty((prompt.shape[0], shape.masks, 0))
        rows = esp_kernels.expand_tree(
            prompt[:, -1].contiguous(),
            nothing,
            nothing.float(),
            shape.rows,
            shape.masks,
            shape.widths,
            self.prune,
        )
        draft.block.copy_(with_metadata(*rows, self.rows))
        draft.probe.copy_(self.probe.initial(self.model, prompt, shape.masks))

    def read(self, tokens: torch.Tensor, hidden: torch.Tensor, draft: Draft) -> None:
        """Nothing: the probe knows the prompt from `start`."""

    def advance(self, outcome: Outcome, draft: Draft) -> Verdict:
        block, shape = draft.block, self.shape
        return Verdict(
            *esp_kernels.advance_block(
                outcome.ids,
                outcome.logprobs,
                block.tokens,
                block.parent,
                block.mask_ordinal,
                block.depth,
                block.ancestors,
                draft.probe,
                self.model.embedding,
                self.probe.lam,
                shape.rows,
                shape.masks,
                shape.widths,
                self.prune,
            )
        )
