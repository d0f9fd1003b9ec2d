"""What a profile says of the sources of drafts."""

from dataclasses import dataclass

import torch

from esp_kernels import Memory
from esp_kernels.ops._memory import Lists

# Fitted to the demo model's answers to SpecBench, without a prior: where no profile is at hand.
SHARED = {"mask": 0.3, "prior": 0.5, "recycled": 0.2, "context": 0.2, "copy": 0.8, "other": 4.0}


@dataclass(frozen=True)
class Sources:
    """As join_tree and learn_weights take them.

    weights  [16, 6] float32
    prior    ids [V, P] int32 and logprobs [V, P] float32
    lists    that every sequence begins with: what was heard behind contexts of other sequences
    reach    tokens that each mask of the deepest accepted row adds to the next step
    least    tokens that a row must be expected to commit
    rate     of learning within a sequence
    """

    weights: torch.Tensor
    prior: tuple[torch.Tensor, torch.Tensor]
    reach: tuple[float, ...] = (0.15, 0.06, 0.03)
    least: float = 0.003
    rate: float = 0.01
    lists: Lists | None = None

    def new_memory(self, batch: int, capacity: int) -> Memory:
        """Empty; `memory.forget(sources.lists)` begins a sequence."""
        slots = {} if self.lists is None else {"slots": self.lists[0].shape[1]}
        return Memory.empty(batch, capacity, self.weights.device, **slots)


Contexts = dict[tuple[int, ...], list[tuple[int, float]]]
"""Behind each context of 1 to 4 tokens candidates and their log-probabilities, best first."""


def contexts_of(lists: Lists) -> Contexts:
    """What the lists of one sequence say, for drafters that think on the host."""
    found: Contexts = {}
    for n, (keys, ids, logprobs) in enumerate(zip(*lists, strict=True), 1):
        used = keys[:, 0] >= 0
        rows = (part[used].tolist() for part in (keys[:, :n], ids, logprobs))
        for key, tokens, said in zip(*rows, strict=True):
            found[tuple(key)] = [one for one in zip(tokens, said, strict=True) if one[0] >= 0]
    return found


def default_sources(device: torch.device) -> Sources:
    ids = torch.empty((0, 0), dtype=torch.int32, device=device)
    weights = torch.tensor([list(SHARED.values())], device=device).repeat(16, 1)
    return Sources(weights, (ids, ids.float()))
