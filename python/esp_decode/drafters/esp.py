"""Embedding-space probing: the tree comes from the masks of the deepest accepted row (paper, Section 3)."""

from dataclasses import dataclass

import torch

import esp_kernels
from esp_decode.model import Model
from esp_decode.probe import initial_probe
from esp_decode.tree import Block, TreeShape, with_metadata


@dataclass
class Verdict:
    """path [B, T] the accepted rows in order, root first, -1 behind them; accepted [B] how many drafts, -1
    for a padded sequence; committed [B, T] the tokens decided in this step, the next root last, then -1."""

    path: torch.Tensor
    accepted: torch.Tensor
    committed: torch.Tensor


@dataclass(frozen=True)
class EspDrafter:
    """A tree of one row without masks is plain decoding."""

    model: Model
    shape: TreeShape
    rows: int
    probe: str
    lam: float
    prune: bool

    def start(self, prompt: torch.Tensor) -> tuple[Block, torch.Tensor]:
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
        return with_metadata(*rows, self.rows), initial_probe(self.probe, self.model, prompt, shape.masks)

    def advance(self, logits: torch.Tensor, block: Block, probe: torch.Tensor) -> Verdict:
        shape = self.shape
        logprobs, ids = esp_kernels.topk_logprobs(logits, min(shape.widest + self.prune, logits.shape[-1]))
        return Verdict(
            *esp_kernels.advance_block(
                ids,
                logprobs,
                block.tokens,
                block.parent,
                block.mask_ordinal,
                block.depth,
                block.ancestors,
                probe,
                self.model.embedding,
                self.lam,
                shape.rows,
                shape.masks,
                shape.widths,
                self.prune,
            )
        )
