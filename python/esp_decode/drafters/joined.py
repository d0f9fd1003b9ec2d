"""All sources in one tree: masks, copying, what the model said before, and a prior (see join_tree)."""

from dataclasses import dataclass

import torch

import esp_kernels
from esp_decode.drafters.base import Draft, Outcome, Verdict, verify
from esp_decode.model import Model
from esp_decode.probe import Probe
from esp_decode.sources import Sources
from esp_decode.tree import Block, empty_block, with_metadata
from esp_kernels import PADDING, Memory

CANDIDATES = 32  # of a mask; half of them lose a hundredth of the acceptance length


@dataclass
class JoinedDraft(Draft):
    """memory                  of each sequence
    mask_ids, mask_logprobs  [B, K, N], of the masks behind the root; -1 for none
    weights                 [B, 16, 6] float32, of the sources, as the sequence has taught them
    """

    memory: Memory
    mask_ids: torch.Tensor
    mask_logprobs: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class JoinedDrafter:
    """On the CPU a block is as small as what is drafted; elsewhere it has `rows`."""

    model: Model
    sources: Sources
    probe: Probe
    budget: int
    rows: int
    on_device: bool = False

    @property
    def candidates(self) -> int:
        return min(CANDIDATES, self.model.vocab_size)

    def new_draft(self, batch: int, capacity: int) -> JoinedDraft:
        device, masks = self.model.device, len(self.sources.reach)
        mask_ids = torch.full((batch, masks, self.candidates), -1, dtype=torch.int32, device=device)
        return JoinedDraft(
            block=empty_block(batch, self.rows, device),
            probe=torch.empty((batch, masks, self.model.embedding.shape[1]), device=device),
            memory=self.sources.new_memory(batch, capacity),
            mask_ids=mask_ids,
            mask_logprobs=mask_ids.float(),
            weights=self.sources.weights.repeat(batch, 1, 1),
        )

    def start(self, prompt: torch.Tensor, draft: Draft) -> None:
        assert isinstance(draft, JoinedDraft)
        draft.memory.forget(self.sources.lists)
        no_rows = prompt[:, :0].contiguous()
        no_ids = no_rows[..., None]
        esp_kernels.remember_block(draft.memory, no_rows, no_rows, no_rows, no_ids, no_ids.float(), prompt)
        draft.weights.copy_(self.sources.weights)
        draft.mask_ids.fill_(-1)
        draft.probe.copy_(self.probe.initial(self.model, prompt, draft.probe.shape[1]))
        draft.block = self._next_block(draft)

    def read(self, tokens: torch.Tensor, hidden: torch.Tensor, draft: Draft) -> None:
        """Nothing: the memory knows the prompt from `start`."""

    def advance(self, outcome: Outcome, draft: Draft) -> Verdict:
        assert isinstance(draft, JoinedDraft)
        block = draft.block
        verdict, _ = verify(outcome.choice, block)
        known = (draft.memory, draft.mask_ids, draft.mask_logprobs, *self.sources.prior)
        esp_kernels.learn_weights(*known, draft.weights, verdict.committed, self.sources.rate)
        ids, logprobs = outcome.ids, outcome.logprobs
        rows = (block.tokens, block.parent, block.mask_ordinal)
        esp_kernels.remember_block(draft.memory, *rows, ids, logprobs, verdict.committed)
        take_masks(draft, outcome, verdict)
        if self.probe.lam:
            embedding = self.model.embedding
            esp_kernels.update_probe(draft.probe, embedding, verdict.committed, self.probe.lam)
        draft.block = self._next_block(draft)
        return verdict

    def _next_block(self, draft: JoinedDraft) -> Block:
        tokens, parent, ordinal, _ = esp_kernels.join_tree(
            draft.memory,
            draft.mask_ids,
            draft.mask_logprobs,
            *self.sources.prior,
            draft.weights,
            self.budget,
            self.sources.reach,
            self.sources.least,
        )
        if self.model.device.type != "cpu":
            return with_metadata(tokens, parent, ordinal, self.rows)
        used = max(1, int((parent != PADDING).sum(dim=1).max()))
        tokens, parent, ordinal = (row[:, :used].contiguous() for row in (tokens, parent, ordinal))
        return with_metadata(tokens, parent, ordinal, used)


def take_masks(draft: JoinedDraft, outcome: Outcome, verdict: Verdict) -> None:
    """What the masks of the deepest accepted row said, -1 where it had none."""
    block = draft.block
    row = verdict.path.gather(1, verdict.accepted[:, None].clamp(min=0).long())
    for level in range(draft.mask_ids.shape[1]):
        is_mask = (block.parent == row) & (block.mask_ordinal == level + 1)
        missing = ~is_mask.any(dim=1, keepdim=True)
        row = is_mask.int().argmax(dim=1, keepdim=True)
        at = row[..., None].expand(-1, -1, outcome.ids.shape[2])
        draft.mask_ids[:, level] = outcome.ids.gather(1, at)[:, 0].masked_fill(missing, -1)
        draft.mask_logprobs[:, level] = outcome.logprobs.gather(1, at)[:, 0]
        row = row.masked_fill(missing, len(block.parent[0]))
