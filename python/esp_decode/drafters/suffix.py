"""SuffixDecoding (arXiv 2411.04975): what followed the sequence's own suffixes, by how often it did."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from esp_decode.drafters.best_first import best_first
from esp_decode.drafters.host import Node, SeenRow

DEEPEST = 24  # tokens of a suffix and what is kept behind it, together


@dataclass
class Place:
    """Where an n-gram leads in the tree of all suffixes: how often it occurs, and what it goes on with."""

    count: int = 0
    next: dict[int, "Place"] = field(default_factory=dict)


class SuffixProposer:
    """A tree of the suffixes of prompt and output, grown by DEEPEST places a token. Of the suffixes that have
    occurred before, the one whose drafts are expected to be accepted most makes the tree; of a suffix of n
    tokens come at most PER_TOKEN * n drafts, since short ones tell little (Section 4.2)."""

    PER_TOKEN = 8

    def __init__(self, budget: int):
        self._limit = budget - 1

    def start(self, prompt: Sequence[int]) -> None:
        self._root = Place()
        self._suffixes = [self._root]  # by their lengths, 0 first
        self._extend(prompt)

    def observe(self, committed: Sequence[int], rows: Sequence[SeenRow]) -> None:
        self._extend(committed)

    def propose(self) -> list[Node]:
        best: list[Node] = []
        most = 0.0
        for n, place in enumerate(self._suffixes[1:], 1):
            if not place.next:
                break  # nor has a longer suffix occurred before
            nodes, expected = _drafts(place, min(self._limit, self.PER_TOKEN * n))
            if expected >= most:
                best, most = nodes, expected
        return best

    def _extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            grown = [self._root]
            for place in self._suffixes[:DEEPEST]:
                place = place.next.setdefault(token, Place())
                place.count += 1
                grown.append(place)
            self._suffixes = grown


def _drafts(place: Place, limit: int) -> tuple[list[Node], float]:
    """The most frequent drafts behind a place, and how many of them are expected to be accepted."""
    chances: dict[tuple[int, ...], float] = {(): 1.0}

    def children(path: Sequence[int]) -> list[tuple[int, float]]:
        at = place
        for token in path:
            at = at.next[token]
        total = sum(child.count for child in at.next.values())
        shares = [(token, child.count / total) for token, child in at.next.items()]
        chances.update({(*path, token): chances[tuple(path)] * share for token, share in shares})
        return shares

    nodes = best_first(children, limit)
    paths: list[tuple[int, ...]] = [()]
    for node in nodes:
        paths.append((*paths[node.parent], node.token))
    return nodes, sum(chances[path] for path in paths[1:])
