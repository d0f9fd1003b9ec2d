"""Lookahead decoding (arXiv 2402.02057): Jacobi iteration refines guesses in parallel, and fills a pool."""

import random
from collections import OrderedDict
from collections.abc import Sequence

from esp_decode.drafters.host import Node, SeenRow

# (L, W, G) by the least budget: tokens of an n-gram, columns of the window, n-grams verified a step. They
# are of an earlier tuning on the demo model. ESP's authors use (3, 4, 1), (4, 5, 5), (5, 8, 7) at 10, 30, 60.
SETTINGS = {60: (4, 8, 12), 30: (3, 8, 7), 10: (3, 3, 2), 2: (2, 1, 1)}


class LadeProposer:
    """A window of W columns and L - 1 levels: its first level is a chain that begins with the root, and a row
    of another level hangs from the row above it in its column, which lets it see what the paper's mask lets
    it see (Figure 4). Each step every column gives an n-gram, its rows and the model's choice behind the
    last, and the window moves on. The latest G n-grams of the pool that begin with the root are verified,
    joined where they begin alike; those of the prompt are in the pool from the start.

    A row of the window is a draft like others: it may be accepted."""

    def __init__(self, budget: int):
        setting = next(setting for least, setting in SETTINGS.items() if least <= budget)
        self._levels, self._columns, self._verified = setting

    def start(self, prompt: Sequence[int]) -> None:
        self._random = random.Random(0)
        self._tokens = list(prompt)
        self._pool: dict[int, OrderedDict[tuple[int, ...], None]] = {}
        for i in range(len(prompt) - self._levels + 1):
            self._remember(prompt[i : i + self._levels])
        self._window = [self._guesses(self._columns) for _ in range(self._levels - 1)]
        self._rows: list[list[int]] = []  # where the window's rows stand in the block that is run

    def observe(self, committed: Sequence[int], rows: Sequence[SeenRow]) -> None:
        self._tokens += committed
        if not self._rows:
            return
        choices = [rows[row].ids[0] for row in self._rows[-1]]
        for column, choice in enumerate(choices):
            self._remember([*(rows[level[column]].token for level in self._rows), choice])
        gone = len(committed) - 1  # columns that the root has passed, beside its own
        moved = [level[gone:] for level in (*self._window[1:], choices)]
        self._window = [level + self._guesses(self._columns - len(level)) for level in moved]

    def propose(self) -> list[Node]:
        nodes = _joined(list(reversed(self._pool.get(self._tokens[-1], {})))[: self._verified])
        self._rows = []
        for level, guesses in enumerate(self._window):
            row_of: list[int] = []
            for column, token in enumerate(guesses):
                if level == 0 and column == 0:
                    row_of.append(0)
                    continue
                above = row_of[-1] if level == 0 else self._rows[-1][column]
                nodes.append(Node(token, above))
                row_of.append(len(nodes))
            self._rows.append(row_of)
        return nodes

    def _guesses(self, count: int) -> list[int]:
        """Tokens that have occurred: the first guesses of a column."""
        return self._random.choices(self._tokens, k=count)

    def _remember(self, gram: Sequence[int]) -> None:
        """The latest n-grams of a first token stand last, and only so many are kept as are verified."""
        behind = self._pool.setdefault(gram[0], OrderedDict())
        behind[tuple(gram[1:])] = None
        behind.move_to_end(tuple(gram[1:]))
        if len(behind) > self._verified:
            behind.popitem(last=False)


def _joined(chains: Sequence[tuple[int, ...]]) -> list[Node]:
    """Chains from the root as one tree."""
    row_of: dict[tuple[int, ...], int] = {(): 0}
    nodes: list[Node] = []
    for chain in chains:
        for end in range(1, len(chain) + 1):
            if chain[:end] not in row_of:
                nodes.append(Node(chain[end - 1], row_of[chain[: end - 1]]))
                row_of[chain[:end]] = len(nodes)
    return nodes
