"""STAND (arXiv 2506.04708): n-grams that remember the model's own probabilities."""

import math
from collections.abc import Iterable, Sequence

from esp_decode.drafters.best_first import best_first
from esp_decode.drafters.host import Node, SeenRow
from esp_decode.sources import Contexts

KEPT = 8  # candidates of a context
LONGEST = 4  # tokens of a context


class StandProposer:
    """For each context of 1 to 4 tokens the model's candidates and their probabilities, when it last read it.
    The tree follows the longest context that is known; what the profile heard is known from the start. The
    paper draws its tokens by Gumbel top-k; greedy decoding is served best by the most probable ones."""

    def __init__(self, budget: int, known: Contexts):
        self._limit = budget - 1
        self._known = {context: _probabilities(said) for context, said in known.items()}

    def start(self, prompt: Sequence[int]) -> None:
        self._tail = tuple(prompt[-LONGEST:])
        self._heard = dict(self._known)

    def observe(self, committed: Sequence[int], rows: Sequence[SeenRow]) -> None:
        before = self._tail[:-1]
        paths: list[tuple[int, ...]] = []
        for row in rows:
            path = (*paths[row.parent], row.token) if row.parent >= 0 else (row.token,)
            paths.append(path)
            said = _probabilities(zip(row.ids, row.logprobs, strict=True))
            context = (*before, *path)
            for n in range(1, min(LONGEST, len(context)) + 1):
                self._heard[context[-n:]] = said
        self._tail = (*self._tail, *committed)[-LONGEST:]

    def propose(self) -> list[Node]:
        return best_first(self._follows, self._limit)

    def _follows(self, path: Sequence[int]) -> list[tuple[int, float]]:
        context = (*self._tail, *path)
        for n in range(min(LONGEST, len(context)), 0, -1):
            if (said := self._heard.get(context[-n:])) is not None:
                return said
        return []


def _probabilities(said: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(token, math.exp(logprob)) for token, logprob in said]
