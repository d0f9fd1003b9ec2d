"""Trees of the most probable drafts, for proposers."""

import heapq
from collections.abc import Callable, Iterable, Sequence

from esp_decode.drafters.host import Node

Children = Callable[[Sequence[int]], Iterable[tuple[int, float]]]


def best_first(children: Children, limit: int) -> list[Node]:
    """The `limit` drafts of highest probability. children(path) are the tokens that may follow a path of
    drafts, each once, and how probable each is behind it."""
    heap: list[tuple[float, int, int, tuple[int, ...]]] = []
    nodes: list[Node] = []

    def offer(chance: float, row: int, path: tuple[int, ...]) -> None:
        for token, probability in children(path):
            if probability > 0:
                heapq.heappush(heap, (-chance * probability, len(path), row, (*path, token)))

    offer(1.0, 0, ())
    while heap and len(nodes) < limit:
        chance, _, above, path = heapq.heappop(heap)
        nodes.append(Node(path[-1], above))
        offer(-chance, len(nodes), path)
    return nodes
