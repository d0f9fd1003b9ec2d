"""Drafters: who guesses the tokens of the next block."""

from typing import Protocol

import torch

from esp_decode.drafters.ar import ArDrafter
from esp_decode.drafters.esp import EspDrafter
from esp_decode.tree import Block

DRAFTERS = ("ar", "esp")


class Drafter(Protocol):
    """A drafter is used for one sequence batch at a time and is made anew for each.

    masks  mask rows a node
    rows   rows of the largest block that `draft` returns
    probe  [B, masks, E] float32, what the mask rows carry
    """

    masks: int
    rows: int
    probe: torch.Tensor

    def draft(self, root: torch.Tensor, committed: torch.Tensor, mask_logits: torch.Tensor) -> Block:
        """The next block for the roots [B], given the tokens just committed [B, N] (-1 behind the last) and
        the logits [B, masks, V] of the masks of the deepest accepted row."""


__all__ = ["DRAFTERS", "ArDrafter", "Drafter", "EspDrafter"]
