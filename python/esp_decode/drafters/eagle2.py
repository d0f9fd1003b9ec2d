"""EAGLE-2: a one-layer drafter grows a tree by confidence, then re-ranks it (arXiv 2406.16858)."""

from dataclasses import dataclass
from pathlib import Path

import torch

import esp_kernels
from esp_decode.cache import Cache
from esp_decode.drafters.base import Draft, Outcome, Verdict, verify
from esp_decode.drafters.eagle_layer import EagleLayer
from esp_decode.model import Model
from esp_decode.tree import Block, chain_block, empty_block, with_metadata

WIDEST, DEEPEST = 10, 6  # nodes expanded a level, and levels (Section 5 of the paper)


@dataclass
class EagleDraft(Draft):
    """cache    of the layer; its entry t belongs to feature t and token t + 1
    pending  prompt tokens [B, n] that have not met the feature before them
    """

    cache: Cache
    pending: torch.Tensor

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors, self.cache.prefix_len]


@dataclass
class Candidates:
    """Nodes that a tree may take, parents first.

    tokens  [B, N] int32
    scores  [B, N] float32, summed log-probabilities from the root
    above   [B, N] int64, the candidate that each hangs from, -1 for the root
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    above: torch.Tensor

    def __add__(self, more: "Candidates") -> "Candidates":
        pairs = zip(vars(self).values(), vars(more).values(), strict=True)
        return Candidates(*(torch.cat(pair, dim=1) for pair in pairs))


@dataclass(frozen=True)
class Eagle2Drafter:
    model: Model
    layer: EagleLayer
    budget: int
    rows: int
    candidates: int = 1
    on_device: bool = True

    @classmethod
    def load(cls, folder: Path, model: Model, budget: int, rows: int) -> "Eagle2Drafter":
        return cls(model, EagleLayer.load(folder, model), budget, rows)

    @property
    def width(self) -> int:
        return min(WIDEST, self.budget - 1)

    @property
    def levels(self) -> int:
        return min(DEEPEST, self.budget - 1)

    def new_draft(self, batch: int, capacity: int) -> EagleDraft:
        cache = self.layer.new_cache(batch, capacity + 1 + self.width * self.levels)
        probe = torch.empty((batch, 0, self.model.embedding.shape[1]), device=self.model.device)
        block = empty_block(batch, self.rows, self.model.device)
        return EagleDraft(block, probe, cache, pending=block.tokens[:, :0])

    def start(self, prompt: torch.Tensor, draft: Draft) -> None:
        assert isinstance(draft, EagleDraft)
        draft.block.copy_(chain_block(prompt[:, -1:], self.rows))
        draft.cache.prefix_len.zero_()
        draft.pending = prompt[:, 1:]

    def read(self, tokens: torch.Tensor, hidden: torch.Tensor, draft: Draft) -> None:
        assert isinstance(draft, EagleDraft)
        behind, draft.pending = draft.pending.tensor_split([tokens.shape[1]], dim=1)
        chain = torch.arange(-1, behind.shape[1] - 1, dtype=torch.int32, device=behind.device)
        self.layer.forward(behind, hidden, chain.repeat(behind.shape[0], 1), draft.cache)
        draft.cache.advance(tokens.shape[1])

    def advance(self, outcome: Outcome, draft: Draft) -> Verdict:
        assert isinstance(draft, EagleDraft)
        verdict, bonus = verify(outcome.choice, draft.block)
        feature = self._append(outcome.hidden, verdict, draft.cache)
        found = self._grow(bonus, feature, draft.cache)
        draft.cache.prefix_len += (verdict.accepted >= 0).int()
        draft.block.copy_(best_tree(bonus, found, self.budget, self.rows))
        return verdict

    def _append(self, hidden: torch.Tensor, verdict: Verdict, cache: Cache) -> torch.Tensor:
        """The committed tokens behind the features that chose them; the bonus stays outside of the prefix, as
        row 0 of what is drafted. Returns the feature [B, 1, E] guessed behind it."""
        path, tokens = (t[:, : self.levels + 1] for t in (verdict.path, verdict.committed))
        features = hidden.take_along_dim(path.clamp(min=0)[..., None].long(), dim=1)
        above = torch.arange(-1, path.shape[1] - 1, dtype=torch.int32, device=path.device)
        parent = above.where(path >= 0, esp_kernels.PADDING)
        guessed = self.layer.forward(tokens, features, parent, cache)
        last = verdict.accepted.clamp(min=0)
        cache.prefix_len += last
        return guessed.take_along_dim(last[:, None, None].long(), dim=1)

    def _grow(self, bonus: torch.Tensor, feature: torch.Tensor, cache: Cache) -> Candidates:
        """The best `width` candidates of each level are run and give `width` candidates each to the next."""
        width = self.width
        logprobs, ids = esp_kernels.topk_logprobs(self.model.lm_head(feature), width)
        above = torch.full_like(ids[:, 0], -1, dtype=torch.int64)
        found = Candidates(ids[:, 0], logprobs[:, 0], above)
        tokens, scores, features = found.tokens, found.scores, feature.expand(-1, width, -1)
        chosen = torch.arange(width, device=ids.device).expand_as(above)  # candidates that are run
        alive = (bonus >= 0)[:, None]
        parent = torch.where(alive, -1, esp_kernels.PADDING).int()
        rows = torch.zeros_like(tokens)  # that they hang from
        for _ in range(1, self.levels):
            first = parent.shape[1]
            parent = torch.cat([parent, rows.where(alive, esp_kernels.PADDING)], dim=1)
            hidden = self.layer.forward(tokens, features, parent, cache)
            logprobs, ids = esp_kernels.topk_logprobs(self.model.lm_head(hidden), width)
            level = Candidates(
                ids.flatten(1),
                (scores[..., None] + logprobs).flatten(1),
                chosen.repeat_interleave(width, dim=1),
            )
            scores, best = level.scores.topk(width, dim=1)
            tokens, chosen = level.tokens.gather(1, best), found.tokens.shape[1] + best
            features = hidden.take_along_dim((best // width)[..., None], dim=1)
            rows = (first + best // width).int()
            found = found + level
        return found


def best_tree(root: torch.Tensor, found: Candidates, budget: int, rows: int) -> Block:
    """The root [B] and the `budget` - 1 candidates of highest score. No candidate scores above its parent,
    which stands before it: a stable sort keeps them closed under ancestors."""
    best = found.scores.argsort(dim=1, descending=True, stable=True)[:, : budget - 1].sort(dim=1).values
    row = torch.arange(1, best.shape[1] + 1, device=best.device).expand_as(best)
    row_of = torch.zeros_like(found.above).scatter_(1, best, row)
    above = found.above.gather(1, best)
    parent = row_of.gather(1, above.clamp(min=0)).where(above >= 0, 0)
    alive = (root >= 0)[:, None]
    tokens = torch.cat([root[:, None], found.tokens.gather(1, best).where(alive, -1)], dim=1)
    parents = torch.cat([torch.full_like(root[:, None], -1), parent.int()], dim=1).where(
        alive, esp_kernels.PADDING
    )
    return with_metadata(
        tokens, parents, torch.where(alive, 0, -1).int().expand_as(tokens).contiguous(), rows
    )
