"""Greedy verification of a block: which rows the model itself would have produced."""

from dataclasses import dataclass

import torch

import esp_kernels
from esp_decode.tree import Block


@dataclass
class Verdict:
    """path [B, T] the accepted rows in order, root first, -1 behind them; accepted [B] how many drafts;
    bonus [B] the next root; committed [B, T] the tokens decided in this step, bonus last, -1 behind it."""

    path: torch.Tensor
    accepted: torch.Tensor
    bonus: torch.Tensor
    committed: torch.Tensor

    @property
    def deepest(self) -> torch.Tensor:
        """[B] the deepest accepted row, whose masks draft the next tree."""
        return self.path.gather(1, self.accepted[:, None].long())[:, 0]


def verify(block: Block, logits: torch.Tensor) -> Verdict:
    """`logits` [B, T, V] of every row; the model's choice is the largest, the lowest id among equals."""
    choice = logits.argmax(dim=-1).int()
    path, accepted, bonus = esp_kernels.verify_tree(choice, block.tokens, block.parent, block.mask_ordinal)
    committed = choice.gather(1, path.clamp(min=0).long()).masked_fill(path < 0, -1)
    return Verdict(path, accepted, bonus, committed)
