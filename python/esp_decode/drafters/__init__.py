"""Drafters: who guesses the tokens of the next block."""

from typing import Protocol

import torch

from esp_decode.drafters.esp import EspDrafter, Verdict
from esp_decode.tree import Block

DRAFTERS = ("ar", "esp")


class Drafter(Protocol):
    """What a drafter knows of a sequence lies in its block and its probe, on the device."""

    @property
    def rows(self) -> int:
        """Rows of every block, padding included."""

    def start(self, prompt: torch.Tensor) -> tuple[Block, torch.Tensor]:
        """The first block, with the last token of the prompt [B, N] for a root, and the probe."""

    def advance(self, logits: torch.Tensor, block: Block, probe: torch.Tensor) -> Verdict:
        """Verify the block by its rows' logits [B, T, V]; block and probe become the next step's."""


__all__ = ["DRAFTERS", "Drafter", "EspDrafter", "Verdict"]
