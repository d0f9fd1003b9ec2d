"""Medusa: trained heads on the last hidden state, a static tree (arXiv 2401.10774)."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

import esp_kernels
from esp_decode.drafters.base import Draft, Outcome, Verdict, verify
from esp_decode.drafters.heads import open_heads, read_counts
from esp_decode.model import Linear, Model
from esp_decode.tree import Block, chain_block, empty_block, with_metadata
from esp_decode.weights import Tensors

# The tree that Medusa publishes for its 7B models (FasterDecoding/Medusa, mc_sim_7b_63): a node is its path
# of ranks, "021" the second best token of head 3 behind the third best of head 2 behind the best of head 1.
# Nodes stand in the order in which a search by measured acceptance adds them: the first n serve n + 1 rows.
PUBLISHED_TREE = """
    0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005
    0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070
"""


def best_paths(nodes: int, heads: int) -> list[tuple[int, ...]]:
    """The paths of the tree's first nodes, at most so many, that so many heads reach; parents first."""
    paths = [tuple(map(int, path)) for path in PUBLISHED_TREE.split()]
    return [path for path in paths if len(path) <= heads][:nodes]


@dataclass
class Head:
    """Residual blocks x + silu(W x + b), then an output layer of its own."""

    blocks: list[Linear]
    output: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + F.silu(block(x))
        return self.output(x)


@dataclass(frozen=True)
class MedusaDrafter:
    """heads  head i of 1, 2, ... guesses the i-th token behind the bonus from the state that chose the bonus
    tree   block [1, rows] without tokens: root, drafts and padding
    slots  [drafts] int64, where a draft's token stands among the heads' candidates [heads * ranks]
    ranks  how many candidates of a head the tree uses
    """

    model: Model
    heads: list[Head]
    tree: Block
    slots: torch.Tensor
    ranks: int
    candidates: int = 1
    on_device: bool = True

    @classmethod
    def load(cls, folder: Path, model: Model, budget: int, rows: int) -> "MedusaDrafter":
        """Reads heads in their published form. ValueError names what is missing or does not fit the model."""
        count, layers = read_counts(folder, "medusa_num_heads", "medusa_num_layers")
        paths = best_paths(budget - 1, count)
        tensors = open_heads(folder, "medusa_lm_head", model)
        heads = [_load_head(tensors, i, layers, model) for i in range(max(map(len, paths)))]
        if model.device.type == "cpu":
            rows = 1 + len(paths)
        ranks = 1 + max(map(max, paths))
        places = [(len(path) - 1) * ranks + path[-1] for path in paths]
        slots = torch.tensor(places, device=model.device)
        return cls(model, heads, _tree(paths, rows, model.device), slots, ranks)

    @property
    def rows(self) -> int:
        return self.tree.parent.shape[1]

    def new_draft(self, batch: int, capacity: int) -> Draft:
        probe = torch.empty((batch, 0, self.model.embedding.shape[1]), device=self.model.device)
        return Draft(empty_block(batch, self.rows, self.model.device), probe)

    def start(self, prompt: torch.Tensor, draft: Draft) -> None:
        draft.block.copy_(chain_block(prompt[:, -1:], self.rows))

    def read(self, tokens: torch.Tensor, hidden: torch.Tensor, draft: Draft) -> None:
        """Nothing: the heads need one hidden state, which the first step gives."""

    def advance(self, outcome: Outcome, draft: Draft) -> Verdict:
        verdict, bonus = verify(outcome.choice, draft.block)
        deepest = verdict.path.gather(1, verdict.accepted[:, None].clamp(min=0).long()).clamp(min=0).long()
        hidden = outcome.hidden.take_along_dim(deepest[..., None], dim=1)  # [B, 1, E]
        logits = torch.cat([head(hidden) for head in self.heads], dim=1)
        ids = esp_kernels.topk_logprobs(logits, self.ranks)[1].flatten(1)
        draft.block.tokens[:, : 1 + len(self.slots)] = torch.cat([bonus[:, None], ids[:, self.slots]], dim=1)
        self._hang(draft.block, verdict.accepted[:, None] >= 0)
        return verdict

    def _hang(self, block: Block, real: torch.Tensor) -> None:
        """Every sequence that is `real` [B, 1] in the tree's shape, the others padding."""
        tree, padding = self.tree, esp_kernels.PADDING
        block.tokens.masked_fill_(~real, -1)
        block.parent.copy_(tree.parent.where(real, padding))
        block.mask_ordinal.copy_(tree.mask_ordinal.where(real, -1))
        block.depth.copy_(tree.depth.where(real, -1))
        block.ancestors.copy_(tree.ancestors.where(real[..., None], 0))


def _load_head(tensors: Tensors, index: int, layers: int, model: Model) -> Head:
    vocab, width = model.embedding.shape
    blocks = [tensors.linear([f"{index}.{layer}.linear"], [width], width) for layer in range(layers)]
    return Head(blocks, tensors.linear([f"{index}.{layers}"], [vocab], width))


def _tree(paths: list[tuple[int, ...]], rows: int, device: torch.device) -> Block:
    row_of = {path: row for row, path in enumerate([(), *paths])}
    parent = [-1, *(row_of[path[:-1]] for path in paths)]
    parents = torch.tensor([parent], dtype=torch.int32, device=device)
    return with_metadata(torch.full_like(parents, -1), parents, torch.zeros_like(parents), rows)
