"""What drafters share: what they are told of a block, what they answer, and what they keep."""

from dataclasses import dataclass
from typing import Protocol

import torch

import esp_kernels
from esp_decode.tree import Block


@dataclass
class Draft:
    """What a drafter knows of a batch: the block to run next and the probe [B, masks, E] float32 that its
    mask rows carry. Drafters that keep more add to it."""

    block: Block
    probe: torch.Tensor

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What `advance` changes in place where the drafter is `on_device`."""
        return [self.probe, *self.block.tensors]


@dataclass
class Outcome:
    """What a forward says of every row of its block.

    choice         [B, T] int32, the model's own next token
    ids, logprobs  [B, T, N] int32 and float32, the most probable tokens, best first
    hidden         [B, T, E], normalised, as the LM head took them
    """

    choice: torch.Tensor
    ids: torch.Tensor
    logprobs: torch.Tensor
    hidden: torch.Tensor


@dataclass
class Verdict:
    """path [B, T] the accepted rows in order, root first, -1 behind them; accepted [B] how many drafts, -1
    for a padded sequence; committed [B, T] the tokens decided in this step, the next root last, then -1."""

    path: torch.Tensor
    accepted: torch.Tensor
    committed: torch.Tensor


def verify(choice: torch.Tensor, block: Block) -> tuple[Verdict, torch.Tensor]:
    """What the model's choice [B, T] says of a block, and the next roots [B]; -1 for padded sequences."""
    path, accepted, bonus = esp_kernels.verify_tree(
        choice.contiguous(), block.tokens, block.parent, block.mask_ordinal
    )
    committed = choice.gather(1, path.clamp(min=0).long()).masked_fill(path < 0, -1)
    return Verdict(path, accepted, committed), bonus


class Drafter(Protocol):
    """Who guesses the tokens of the next block.

    rows        the most that a block has, padding included
    candidates  N, how many of a row's most probable tokens it wants to see
    on_device   `advance` works in place and never waits for the device, so that a step can be a CUDA graph
    """

    @property
    def rows(self) -> int: ...

    @property
    def candidates(self) -> int: ...

    @property
    def on_device(self) -> bool: ...

    def new_draft(self, batch: int, capacity: int) -> Draft:
        """Room for sequences of up to `capacity` tokens, which `start` fills."""

    def start(self, prompt: torch.Tensor, draft: Draft) -> None:
        """Begin a prompt [B, N]: the first block has its last token for a root."""

    def read(self, tokens: torch.Tensor, hidden: torch.Tensor, draft: Draft) -> None:
        """Prompt tokens [B, n] that prefill has just run, chunk by chunk after `start`, and their hidden
        states [B, n, E]; the prompt's last token is not among them."""

    def advance(self, outcome: Outcome, draft: Draft) -> Verdict:
        """Verify the block that was run; the draft becomes the next step's."""
