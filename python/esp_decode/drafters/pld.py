"""Prompt lookup decoding: what followed the longest suffix the last time (Saxena 2023)."""

from collections.abc import Sequence

from esp_decode.drafters.host import Node, SeenRow

LONGEST, DEEPEST = 3, 10


class PldProposer:
    """A chain of up to 10 tokens behind the latest earlier occurrence of the last 3 tokens, else 2, else 1.

    The occurrences are kept by n-gram, so a step costs the tokens that it decided and no scan.
    """

    def __init__(self, budget: int):
        self._depth = min(DEEPEST, budget - 1)

    def start(self, prompt: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._behind: dict[
            tuple[int, ...], int
        ] = {}  # where the tokens behind an n-gram begin, at its latest
        self._extend(prompt)

    def observe(self, committed: Sequence[int], rows: Sequence[SeenRow]) -> None:
        self._extend(committed)

    def propose(self) -> list[Node]:
        for n in range(LONGEST, 0, -1):
            begin = self._behind.get(tuple(self._tokens[-n:]))
            if begin is not None:
                found = self._tokens[begin : begin + self._depth]
                return [Node(token, above) for above, token in enumerate(found)]
        return []

    def _extend(self, tokens: Sequence[int]) -> None:
        """An n-gram is entered when a token follows it: the suffix itself never matches."""
        for token in tokens:
            end = len(self._tokens)
            for n in range(1, min(LONGEST, end) + 1):
                self._behind[tuple(self._tokens[end - n :])] = end
            self._tokens.append(token)
