"""What it costs to say who sees whom in a block, naively and as here (paper, Section 5)."""

import statistics
import time
from collections.abc import Callable

import torch

import esp_kernels
from esp_decode.tree import TreeShape

ROUNDS = 21


def microseconds(budget: int, prefix: int) -> dict[str, float]:
    """The median time to build a step's mask and positions, on the CPU, for a dynamic tree with one mask a
    node, by way:

    naive     the whole [T, prefix + T] mask and the positions anew, row by row
    cached    the paper's: the block's part is kept from step to step, only prefix columns are added
    bits      here: depths and ancestor bits from `parent`, and no mask over the prefix; dynamic trees too
    """
    shape = TreeShape(budget, 1, None)
    nodes = shape.nodes
    candidates = torch.arange(1, nodes + 1, dtype=torch.int32)[None, None]
    rows = (shape.rows, shape.masks, shape.widths, False)
    root = torch.zeros(1, dtype=torch.int32)
    _, parent, _ = esp_kernels.expand_tree(root, candidates, -candidates.float(), *rows)
    block = _visible(parent[0].tolist())
    offsets = torch.tensor([_depth(parent[0].tolist(), r) for r in range(budget)])

    def naive() -> object:
        above = parent[0].tolist()
        mask = torch.zeros(len(above), prefix + len(above), dtype=torch.bool)
        mask[:, :prefix] = True
        mask[:, prefix:] = _visible(above)
        return mask, torch.tensor([prefix + _depth(above, r) for r in range(len(above))])

    def cached() -> object:
        seen = torch.ones(budget, prefix, dtype=torch.bool)
        return torch.cat([seen, block], dim=1), offsets + prefix

    ways = {"naive": naive, "cached": cached, "bits": lambda: esp_kernels.tree_metadata(parent)}
    return {name: 1e6 * _median(way) for name, way in ways.items()}


def _visible(parent: list[int]) -> torch.Tensor:
    seen = torch.zeros(len(parent), len(parent), dtype=torch.bool)
    for r in range(len(parent)):
        row = r
        while row >= 0:
            seen[r, row] = True
            row = parent[row]
    return seen


def _depth(parent: list[int], row: int) -> int:
    depth = 0
    while parent[row] >= 0:
        row, depth = parent[row], depth + 1
    return depth


def _median(way: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        way()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
