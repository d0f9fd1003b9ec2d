import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from esp_kernels._block import PADDING, ROOT
from esp_kernels.ops._memory import Memory
from esp_kernels.ref._sources import Sources, sequence


@dataclass
class Node:
    """chance: that it is accepted; deepest: that it is and none of its drafts."""

    path: list[int]
    parent: int
    chance: float
    deepest: float = 0.0
    masks: int = field(default=0)


def join_tree(
    history: torch.Tensor,
    length: torch.Tensor,
    heads: torch.Tensor,
    links: torch.Tensor,
    keys: torch.Tensor,
    list_ids: torch.Tensor,
    list_logprobs: torch.Tensor,
    mask_ids: torch.Tensor,
    mask_logprobs: torch.Tensor,
    prior_ids: torch.Tensor,
    prior_logprobs: torch.Tensor,
    weights: torch.Tensor,
    budget: int,
    reach: Sequence[float],
    least: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    memory = Memory(history, length, heads, links, keys, list_ids, list_logprobs)
    tokens = history.new_full((history.shape[0], budget), -1)
    parent, mask_ordinal = torch.full_like(tokens, PADDING), tokens.clone()
    chance = torch.zeros_like(tokens, dtype=torch.float32)
    for b in range(history.shape[0]):
        if int(length[b]) == 0:
            continue
        mine = sequence(memory, b)
        sources = Sources(mine, mask_ids[b], mask_logprobs[b], prior_ids, prior_logprobs)
        nodes = _grown(sources, weights[b], budget, least)
        nodes = _cut(nodes, budget, reach, least)
        _give_masks(nodes, budget, reach, least)
        root = int(mine.history[int(length[b]) - 1])
        for r, row in enumerate(_rows(nodes, root)):
            tokens[b, r], parent[b, r], mask_ordinal[b, r], chance[b, r] = row
    return tokens, parent, mask_ordinal, chance


def _grown(sources: Sources, weights: torch.Tensor, budget: int, least: float) -> list[Node]:
    """The root and the most probable drafts, best first."""
    nodes: list[Node] = []
    heap: list[tuple[float, int, int, int, list[int]]] = [(-1.0, 0, ROOT, 0, [])]
    while heap and len(nodes) < budget:
        negative, depth, parent, _, path = heapq.heappop(heap)
        if nodes and (-negative < least or negative == 0):
            break
        mixture = sources.behind(path)
        chances, _ = mixture.probabilities(weights)
        order = sorted(range(len(chances)), key=lambda i: -chances[i])
        for rank, i in enumerate(order):
            offer = (negative * chances[i], depth + 1, len(nodes), rank, [*path, mixture.tokens[i]])
            heapq.heappush(heap, offer)
        nodes.append(Node(path, parent, -negative))
    return nodes


def _cut(nodes: list[Node], budget: int, reach: Sequence[float], least: float) -> list[Node]:
    """The most drafts that leave room for the masks that are worth no less than the last of them."""
    for kept in range(len(nodes), 0, -1):
        rest = nodes[:kept]
        for node in rest:
            node.deepest = node.chance
        for node in rest[1:]:
            rest[node.parent].deepest -= node.chance
        bar = rest[-1].chance if kept > 1 else least
        values = [node.deepest * gain for node in rest for gain in reach]
        if kept + sum(value >= bar for value in values) <= budget:
            break
    return rest


def _give_masks(nodes: list[Node], budget: int, reach: Sequence[float], least: float) -> None:
    for _ in range(budget - len(nodes)):
        open_nodes = [node for node in nodes if node.masks < len(reach)]
        best = max(open_nodes, key=lambda node: node.deepest * reach[node.masks], default=None)
        if best is None or best.deepest * reach[best.masks] < least or best.deepest <= 0:
            return
        best.masks += 1


def _rows(nodes: list[Node], root: int) -> list[tuple[int, int, int, float]]:
    """token, parent, mask_ordinal, chance of every row."""
    rows = [(node.path[-1] if node.path else root, node.parent, 0, node.chance) for node in nodes]
    for v, node in enumerate(nodes):
        for ordinal in range(1, node.masks + 1):
            above = v if ordinal == 1 else len(rows) - 1
            rows.append((-1, above, ordinal, node.deepest))
    return rows
