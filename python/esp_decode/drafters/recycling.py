"""Token Recycling (arXiv 2408.08696): what the model thought of behind each token, when it last read it."""

from collections.abc import Sequence

from esp_decode.drafters.best_first import best_first
from esp_decode.drafters.host import Node, SeenRow
from esp_decode.sources import Contexts

KEPT = 8  # candidates of a token (Section 4.1)

# How often the candidate of each rank comes true, about. The tree of a budget is made of them once, static as
# the paper's is: which ranks it has where does not depend on the tokens.
RANKS = (0.46, 0.13, 0.07, 0.04, 0.03, 0.02, 0.015, 0.01)


class RecyclingProposer:
    """A static tree filled from a matrix that maps each token to the model's latest candidates behind it,
    those of rejected rows included. It begins with what the profile heard behind single tokens, if there is
    one: the paper's hot start, but the same for every prompt."""

    def __init__(self, budget: int, known: Contexts):
        self._tree = best_first(lambda ranks: enumerate(RANKS), budget - 1)  # its "tokens" are ranks
        self._hot = {key[0]: [token for token, _ in said] for key, said in known.items() if len(key) == 1}

    def start(self, prompt: Sequence[int]) -> None:
        self._candidates = dict(self._hot)
        self._root = prompt[-1]

    def observe(self, committed: Sequence[int], rows: Sequence[SeenRow]) -> None:
        for row in rows:
            self._candidates[row.token] = row.ids
        self._root = committed[-1]

    def propose(self) -> list[Node]:
        row_of: dict[int, int] = {0: 0}
        nodes: list[Node] = []
        for position, place in enumerate(self._tree, 1):
            above = row_of.get(place.parent)
            if above is None:
                continue
            token = nodes[above - 1].token if above else self._root
            candidates = self._candidates.get(token, [])
            if place.token < len(candidates):
                nodes.append(Node(candidates[place.token], above))
                row_of[position] = len(nodes)
        return nodes
