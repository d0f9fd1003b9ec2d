"""What may follow a context, from one sequence's memory and masks: shared by learn_weights and join_tree."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from esp_kernels.ops._memory import ORDERS, SOURCES, Memory

PLACES = 8
FADE, NOBODY = 0.6, 0.5
FLOORS = (-9.0, -9.0, -9.0, -9.0, -4.0)
MASK, PRIOR, RECYCLED, CONTEXT, COPY = range(SOURCES)

Listed = list[tuple[int, float]]


def bucket(gram: Sequence[int], buckets: int) -> int:
    h = 0
    for token in gram:
        h = ((h ^ (token + 1 & 0xFFFFFFFF)) * 0x9E3779B1) & 0xFFFFFFFF
    h ^= h >> 15
    return h * buckets >> 32


def sequence(memory: Memory, b: int) -> Memory:
    return Memory(*(tensor[b] for tensor in memory))


def ending(memory: Memory, path: Sequence[int]) -> list[int]:
    """The last 4 tokens of a sequence's history and a path behind its end."""
    length = int(memory.length)
    return [*memory.history[max(0, length - ORDERS) : length].tolist(), *path][-ORDERS:]


@dataclass(frozen=True)
class Mixture:
    """tokens [n], features [n][5] of the candidates; pattern of the weights to use."""

    tokens: list[int]
    features: list[list[float]]
    pattern: int

    def probabilities(self, weights: torch.Tensor) -> tuple[list[float], float]:
        """Of the candidates, and of something else."""
        *of_sources, other = weights[self.pattern].tolist()
        scores = [sum(w * x for w, x in zip(of_sources, row, strict=True)) for row in self.features]
        top = max([other, *scores])
        powers = [math.exp(score - top) for score in scores]
        total = math.exp(other - top) + sum(powers)
        return [power / total for power in powers], math.exp(other - top) / total


class Sources:
    """The sources of one sequence: its memory and masks, and the prior of all."""

    def __init__(
        self,
        memory: Memory,
        mask_ids: torch.Tensor,
        mask_logprobs: torch.Tensor,
        prior_ids: torch.Tensor,
        prior_logprobs: torch.Tensor,
    ):
        self._memory = memory
        self._masks = [_listed(*pair) for pair in zip(mask_ids, mask_logprobs, strict=True)]
        self._prior = (prior_ids, prior_logprobs)

    def behind(self, path: Sequence[int]) -> Mixture:
        """What may follow the history and a path of drafts."""
        context, level = ending(self._memory, path), len(path)
        mask = self._masks[level] if level < len(self._masks) else []
        copied, length = self._copied(context)
        listed = {
            MASK: mask,
            PRIOR: self._follows(context[-1]),
            RECYCLED: self._kept(context, 1),
            CONTEXT: next((kept for n in (4, 3, 2) if (kept := self._kept(context, n))), []),
            COPY: copied,
        }
        features: dict[int, list[float]] = {}
        for source, entries in listed.items():
            for token, logprob in entries:
                row = features.setdefault(token, [0.0] * SOURCES)
                row[source] = max(0.0, logprob - FLOORS[source])
        pattern = 4 * (level + 1 if mask else 0) + min(3, length)
        return Mixture(list(features), list(features.values()), pattern)

    def _follows(self, token: int) -> Listed:
        ids, logprobs = self._prior
        return _listed(ids[token], logprobs[token]) if token < len(ids) else []

    def _kept(self, context: list[int], n: int) -> Listed:
        if len(context) < n:
            return []
        gram, m = context[-n:], self._memory
        slot = bucket(gram, m.keys.shape[1])
        if m.keys[n - 1, slot, :n].tolist() != gram:
            return []
        return _listed(m.list_ids[n - 1, slot], m.list_logprobs[n - 1, slot])

    def _copied(self, context: list[int]) -> tuple[Listed, int]:
        for n in range(len(context), 0, -1):
            shares: dict[int, float] = {}
            for i, token in enumerate(self._places(context[-n:])):
                shares[token] = shares.get(token, 0.0) + FADE**i
            if shares:
                total = sum(shares.values()) + NOBODY
                return [(token, math.log(share / total)) for token, share in shares.items()], n
        return [], 0

    def _places(self, gram: list[int]) -> list[int]:
        """The tokens behind the latest places of a context, the latest first."""
        m, n, length = self._memory, len(gram), int(self._memory.length)
        place = int(m.heads[n - 1, bucket(gram, m.heads.shape[1])])
        found: list[int] = []
        while n - 1 <= place < length and len(found) < PLACES:
            if place + 1 < length and m.history[place - n + 1 : place + 1].tolist() == gram:
                found.append(int(m.history[place + 1]))
            earlier = int(m.links[n - 1, place])
            place = earlier if earlier < place else -1
        return found


def _listed(ids: torch.Tensor, logprobs: torch.Tensor) -> Listed:
    return [pair for pair in zip(ids.tolist(), logprobs.tolist(), strict=True) if pair[0] >= 0]
