"""Every row walks up to its root and gathers who it meets: as many turns as the tree is deep."""

import torch
import triton
import triton.language as tl

from esp_kernels._block import ROOT

BLOCK = 128
_ROOT = tl.constexpr(ROOT)


# Bytes: 4 a row and turn, from the cache; 4 + 8 * words a row out.
@triton.jit(do_not_specialize=["rows", "words"])
def _tree_metadata_kernel(parent, depth, ancestors, rows, words, BLOCK: tl.constexpr):
    b, word = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    at = tl.where(inside, row, -1)
    met = tl.zeros([BLOCK], tl.int32)
    bits = tl.zeros([BLOCK], tl.int64)
    rooted = at < -1
    while tl.max(at, 0) >= 0:
        walks = at >= 0
        above = tl.load(parent + b * rows + at, mask=walks, other=-1)
        met += walks.to(tl.int32)
        bits |= tl.where(walks & (at // 64 == word), tl.full([BLOCK], 1, tl.int64) << (at % 64), 0)
        rooted |= (at == 0) & (above == _ROOT)
        at = tl.where(walks & (above < at), above, -1)
    if word == 0:
        tl.store(depth + b * rows + row, tl.where(rooted, met - 1, -1), mask=inside)
    tl.store(ancestors + (b * rows + row) * words + word, tl.where(rooted, bits, 0), mask=inside)


def launch(parent: torch.Tensor, depth: torch.Tensor, ancestors: torch.Tensor) -> None:
    batch, rows, words = ancestors.shape
    if parent.numel():
        grid = (batch, words, triton.cdiv(rows, BLOCK))
        _tree_metadata_kernel[grid](parent, depth, ancestors, rows, words, BLOCK=BLOCK, num_warps=4)


def tree_metadata(parent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, rows = parent.shape
    depth = torch.empty_like(parent)
    ancestors = parent.new_empty((batch, rows, (rows + 63) // 64), dtype=torch.int64)
    launch(parent, depth, ancestors)
    return depth, ancestors
