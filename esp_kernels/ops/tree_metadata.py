"""Depths and ancestor bits of a block's rows."""

import torch

from esp_kernels import _backend
from esp_kernels._block import PADDING, ROOT
from esp_kernels._check import ANY, check_index


def tree_metadata(parent: torch.Tensor, *, backend: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
    """How far every row is from its root, and which rows it sees.

    parent   [B, T] int32, contiguous: the earlier row that row r hangs from, -1 for the root (row 0),
             PADDING (-2) for rows that belong to no tree; nothing may hang from padding
    returns  depth [B, T] int32: 0 for the root, -1 for padding
             ancestors [B, T, ceil(T / 64)] int64: bit j % 64 of word j // 64 is set when row j is r itself
             or an ancestor of r; no bits for padding

    A sequence whose row 0 is padding is padding throughout. Raises ValueError on shapes, dtypes, devices or
    strides that are not as above, and on the CPU on values that are not; on other devices such rows come out
    as padding.
    """
    return _backend.select("tree_metadata", backend, parent, "parent")(parent)


def check(parent: torch.Tensor) -> None:
    check_index(parent, "parent", parent, ANY, ANY)
    rows = parent.shape[1]
    if parent.device.type != "cpu" or rows == 0:
        return
    padding = parent == PADDING
    above = parent.clamp(0, rows - 1).long()
    good = padding | ((parent >= 0) & (parent < torch.arange(rows)) & ~padding.gather(1, above))
    good[:, 0] = padding[:, 0] | (parent[:, 0] == ROOT)
    bad = (~good).nonzero().tolist()
    if bad:
        b, r = bad[0]
        wanted = "-1 (the root) or -2 (a padded sequence)"
        if r > 0:
            wanted = "-2 (padding) or an earlier row that is not padding"
        raise ValueError(f"parent[{b}, {r}] must be {wanted}, got {parent[b, r]}")
