"""Blocks of rows, and the shapes that draft trees may take."""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

import esp_kernels

MAX_BUDGET = 128


@dataclass
class Block:
    """What one forward runs: [root | drafts | masks of row 0 | masks of row 1 | ...], T rows a sequence.

    tokens, parent, mask_ordinal, depth  [B, T] int32
    ancestors                            [B, T, ceil(T / 64)] int64
    """

    tokens: torch.Tensor
    parent: torch.Tensor
    mask_ordinal: torch.Tensor
    depth: torch.Tensor
    ancestors: torch.Tensor

    @property
    def tensors(self) -> list[torch.Tensor]:
        return list(vars(self).values())

    def copy_(self, other: "Block") -> None:
        for mine, new in zip(self.tensors, other.tensors, strict=True):
            mine.copy_(new)


def empty_block(batch: int, rows: int, device: torch.device) -> Block:
    """Of padding alone."""
    nothing = torch.full((batch, rows), -1, dtype=torch.int32, device=device)
    padding = torch.full_like(nothing, esp_kernels.PADDING)
    depth, ancestors = esp_kernels.tree_metadata(padding)
    return Block(nothing, padding, nothing.clone(), depth, ancestors)


def with_metadata(tokens: torch.Tensor, parent: torch.Tensor, mask_ordinal: torch.Tensor, rows: int) -> Block:
    """The block of these rows and padding up to `rows`."""
    spare = (0, rows - tokens.shape[1])
    parent = pad(parent, spare, value=esp_kernels.PADDING)
    depth, ancestors = esp_kernels.tree_metadata(parent)
    return Block(pad(tokens, spare, value=-1), parent, pad(mask_ordinal, spare, value=-1), depth, ancestors)


def chain_block(tokens: torch.Tensor, rows: int) -> Block:
    """The tokens [B, N] of a prompt one behind the other, then padding."""
    batch, length = tokens.shape
    above = torch.arange(-1, length - 1, dtype=torch.int32, device=tokens.device).repeat(batch, 1)
    return with_metadata(tokens, above, torch.zeros_like(above), rows)


@dataclass(frozen=True)
class TreeShape:
    """How a row budget is spent: `budget` rows, `masks` mask rows a node, and the widths of a static tree
    (depth i+1 hangs from the best node of depth i), or None for the dynamic tree of Algorithm 1."""

    budget: int
    masks: int
    widths: tuple[int, ...] | None

    @property
    def nodes(self) -> int:
        return self.budget // (self.masks + 1) if self.widths is None else 1 + sum(self.widths)

    @property
    def rows(self) -> int:
        return self.nodes * (self.masks + 1)

    @property
    def widest(self) -> int:
        """Drafts that may hang from one node; at least 1, the root's own choice."""
        return max(1, self.nodes - 1 if self.widths is None else max(self.widths))

    def __str__(self) -> str:
        return "dynamic" if self.widths is None else "static:" + ",".join(map(str, self.widths))

    @classmethod
    def parse(cls, tree: str, budget: int | None, masks: int, default_budget: int) -> "TreeShape":
        """`tree` is "dynamic" or "static:K1,K2,..."; a budget of None is the default, or what a static tree
        needs. Raises ValueError when they do not fit together."""
        if masks < 1:
            raise ValueError(f"masks must be at least 1, got {masks}")
        widths = _parse_widths(tree, masks)
        if budget is None:
            budget = default_budget if widths is None else (1 + sum(widths)) * (masks + 1)
        if not 2 * (masks + 1) <= budget <= MAX_BUDGET:
            raise ValueError(
                f"budget must be {2 * (masks + 1)} to {MAX_BUDGET} rows with masks={masks} "
                f"(a root, a draft and their mask rows at least), got {budget}"
            )
        shape = cls(budget, masks, widths)
        if shape.rows > budget:
            raise ValueError(
                f"tree {str(shape)!r} with masks={masks} needs a budget of {shape.rows} rows, got {budget}"
            )
        return shape


PLAIN = TreeShape(budget=1, masks=0, widths=None)


def _parse_widths(tree: str, masks: int) -> tuple[int, ...] | None:
    if tree == "dynamic":
        return None
    kind, _, listed = tree.partition(":")
    parts = listed.split(",")
    if kind != "static" or not all(p.strip().isdecimal() and int(p) > 0 for p in parts):
        raise ValueError(f"tree must be 'dynamic' or 'static:K1,K2,...' with positive widths, got {tree!r}")
    if len(parts) > masks:
        raise ValueError(f"tree {tree!r} has {len(parts)} levels, masks={masks} can draft at most {masks}")
    return tuple(map(int, parts))
