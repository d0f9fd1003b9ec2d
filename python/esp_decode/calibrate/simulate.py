"""Decoding without a model: each step's tree walked along the known answer."""

from collections.abc import Iterator

import torch

import esp_kernels
from esp_decode.calibrate.replay import Heard
from esp_decode.sources import Sources
from esp_decode.tree import TreeShape


def esp_steps(heard: Heard, shape: TreeShape, prune: bool) -> Iterator[int]:
    """Yields the tokens that each decode call of drafter `esp` commits, the prefill's first one aside."""
    answer = heard.answer
    position, lag = 0, 0
    while position + 1 < len(answer):
        root = torch.tensor(answer[position : position + 1], dtype=torch.int32)
        ids, logprobs = heard.masks_at(position, lag)
        tree = (shape.nodes, 0, shape.widths, prune)
        tokens, parent, _ = esp_kernels.expand_tree(root, ids, logprobs, *tree)
        lag = len(walk(tokens[0].tolist(), parent[0].tolist(), answer[position + 1 :])) - 1
        took = min(lag + 1, len(answer) - position - 1)
        position += took
        yield took


class JoinedReplay:
    """One sequence behind drafter `joined`. Unlike in decoding, nothing is heard of rows that are not
    accepted, so that it takes a few more calls."""

    def __init__(self, heard: Heard, sources: Sources, weights: torch.Tensor):
        self.heard = heard
        self.sources = sources
        self.weights = weights  # [1, 16, 6], written in place
        self.memory = sources.new_memory(1, len(heard.tokens))
        self.memory.forget(sources.lists)
        self._remember(heard.tokens[None, :0], heard.tokens[None, : heard.prompt_len])
        self._hear(0, 1)

    def _remember(self, rows: torch.Tensor, committed: torch.Tensor, first: int = 0) -> None:
        """Rows [1, T] one behind the other, the first one's answers at `first`, then what was committed."""
        count = rows.shape[1]
        chain = torch.arange(-1, count - 1, dtype=torch.int32)[None]
        ids, logprobs = (t[None, first : first + count] for t in (self.heard.ids, self.heard.logprobs))
        block = (rows.contiguous(), chain, torch.zeros_like(chain))
        esp_kernels.remember_block(self.memory, *block, ids, logprobs, committed.contiguous())

    def _hear(self, first: int, count: int) -> None:
        """Rows of answer tokens first - 1 .. first + count - 2 were run and led to the next one."""
        tokens, begin = self.heard.tokens[None], self.heard.prompt_len + first
        self._remember(tokens[:, begin - 1 : begin + count - 1], tokens[:, begin : begin + count], first)

    def hear_all(self) -> None:
        self._hear(1, len(self.heard.answer) - 1)

    def _masks(self, position: int, lag: int, masks: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids, logprobs = self.heard.masks_at(position, lag)
        ids = ids.clone()
        ids[:, masks:] = -1
        return ids, logprobs

    def _learn(self, masks: tuple[torch.Tensor, torch.Tensor], came: torch.Tensor, rate: float) -> None:
        known = (*masks, *self.sources.prior, self.weights)
        esp_kernels.learn_weights(self.memory, *known, came, rate)

    def learn(self, rate: float) -> None:
        """From every position: with all masks, and with none."""
        answer, depth = torch.tensor([self.heard.answer], dtype=torch.int32), 4
        for position in range(answer.shape[1] - 1):
            came = answer[:, position + 1 : position + 1 + depth].contiguous()
            for masks in (len(self.sources.reach), 0):
                self._learn(self._masks(position, 0, masks), came, rate)
            self._hear(position + 1, 1)

    def steps(self, budget: int) -> Iterator[int]:
        """Yields the tokens that each decode call commits, the prefill's first one aside."""
        answer = self.heard.answer
        position, lag, masks = 0, 0, len(self.sources.reach)
        while position + 1 < len(answer):
            said = self._masks(position, lag, masks)
            known = (*said, *self.sources.prior, self.weights)
            how = (self.sources.reach, self.sources.least)
            rows = esp_kernels.join_tree(self.memory, *known, budget, *how)
            tokens, parent, ordinal, _ = (row[0].tolist() for row in rows)
            parent_of_tokens = [p if o == 0 else -2 for p, o in zip(parent, ordinal, strict=True)]
            path = walk(tokens, parent_of_tokens, answer[position + 1 :])
            lag = len(path) - 1
            masks = _masks_of(path[-1], parent, ordinal)
            took = min(lag + 1, len(answer) - position - 1)
            came = torch.tensor([answer[position + 1 : position + 1 + took]], dtype=torch.int32)
            self._learn(said, came, self.sources.rate)
            self._hear(position + 1, took)
            position += took
            yield took


def _masks_of(row: int, parent: list[int], ordinal: list[int]) -> int:
    count = 0
    for r, (p, o) in enumerate(zip(parent, ordinal, strict=True)):
        if p == row and o == count + 1:
            row, count = r, o
    return count


def walk(tokens: list[int], parent: list[int], answer: list[int]) -> list[int]:
    """The rows of a tree that the answer follows, the root first."""
    path = [0]
    for token in answer:
        below = (r for r, p in enumerate(parent) if p == path[-1] and tokens[r] == token)
        found = next(below, None)
        if found is None:
            break
        path.append(found)
    return path
