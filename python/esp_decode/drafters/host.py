"""Drafters that think on the host: one proposer a sequence reads what was decided and proposes a tree."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

import esp_kernels
from esp_decode.drafters.base import Draft, Outcome, Verdict, verify
from esp_decode.model import Model
from esp_decode.tree import Block, empty_block, with_metadata


@dataclass(frozen=True)
class SeenRow:
    """A row of the block that was run: its token, the row that it hangs from (-1: the root), and the model's
    most probable next tokens behind it, best first, with their log-probabilities."""

    token: int
    parent: int
    ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Node:
    """A drafted token and the row that it hangs from: 0 is the root, i the i-th node of the proposal."""

    token: int
    parent: int


class Proposer(Protocol):
    """Drafts for one sequence."""

    def start(self, prompt: Sequence[int]) -> None:
        """Forget everything and begin a prompt, whose last token is the first root."""

    def observe(self, committed: Sequence[int], rows: Sequence[SeenRow]) -> None:
        """The tokens that a step decided, the next root last, and the rows that it ran."""

    def propose(self) -> list[Node]:
        """The drafts behind the root, parents first, at most the budget's rows less one."""


@dataclass
class HostDraft(Draft):
    proposers: list[Proposer] = field(default_factory=list)


@dataclass(frozen=True)
class HostDrafter:
    """new_proposer  makes the proposer of a sequence
    rows          the most rows of a block; on a GPU every block is padded to them, so that its products are
                  those of plain decoding; on the CPU a block is as small as what is proposed
    candidates    how many of each row's most probable tokens the proposers are shown
    """

    new_proposer: Callable[[], Proposer]
    rows: int
    candidates: int
    model: Model
    on_device: bool = False

    def new_draft(self, batch: int, capacity: int) -> HostDraft:
        no_probe = torch.empty((batch, 0, self.model.embedding.shape[1]), device=self.model.device)
        proposers = [self.new_proposer() for _ in range(batch)]
        return HostDraft(empty_block(batch, self.rows, self.model.device), no_probe, proposers)

    def start(self, prompt: torch.Tensor, draft: Draft) -> None:
        assert isinstance(draft, HostDraft)
        for proposer, tokens in zip(draft.proposers, prompt.tolist(), strict=True):
            proposer.start(tokens)
        draft.block = self._block(prompt[:, -1].tolist(), [[] for _ in draft.proposers])

    def read(self, tokens: torch.Tensor, hidden: torch.Tensor, draft: Draft) -> None:
        """Nothing: proposers know the prompt from `start`."""

    def advance(self, outcome: Outcome, draft: Draft) -> Verdict:
        assert isinstance(draft, HostDraft)
        block = draft.block
        verdict, _ = verify(outcome.choice, block)
        decided = [[t for t in row if t >= 0] for row in verdict.committed.tolist()]
        columns = (block.tokens, block.parent, outcome.ids, outcome.logprobs)
        for b, proposer in enumerate(draft.proposers):
            seen = zip(*(column[b].tolist() for column in columns), strict=True)
            if decided[b]:
                proposer.observe(decided[b], [SeenRow(*row) for row in seen if row[0] >= 0])
        roots = [tokens[-1] if tokens else -1 for tokens in decided]
        proposed = [p.propose() if root >= 0 else [] for p, root in zip(draft.proposers, roots, strict=True)]
        draft.block = self._block(roots, proposed)
        return verdict

    def _block(self, roots: Sequence[int], proposed: Sequence[Sequence[Node]]) -> Block:
        used = 1 + max(map(len, proposed))
        assert used <= self.rows, f"{used} rows proposed, {self.rows} are allowed"
        tokens = torch.full((len(roots), used), -1, dtype=torch.int32)
        parent = torch.full_like(tokens, esp_kernels.PADDING)
        for b, (root, nodes) in enumerate(zip(roots, proposed, strict=True)):
            if root < 0:
                continue
            tokens[b, 0], parent[b, 0] = root, -1
            for row, node in enumerate(nodes, 1):
                tokens[b, row], parent[b, row] = node.token, node.parent
        ordinal = torch.where(parent == esp_kernels.PADDING, -1, 0).int()
        device = self.model.device
        rows = used if device.type == "cpu" else self.rows
        on_device = [t.to(device) for t in (tokens, parent, ordinal)]
        return with_metadata(on_device[0], on_device[1], on_device[2], rows)
