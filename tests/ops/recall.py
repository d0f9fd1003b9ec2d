"""What a sequence has shown, in plain Python: an oracle for remember_block, learn_weights and join_tree that
scans and shares no code with them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from esp_kernels import Memory

Listed = list[tuple[int, float]]


@dataclass
class Recall:
    """masks, prior: what each mask, and each token anywhere, is followed by."""

    history: list[int] = field(default_factory=list)
    lists: dict[tuple[int, ...], Listed] = field(default_factory=dict)
    masks: list[Listed] = field(default_factory=list)
    prior: list[Listed] = field(default_factory=list)

    def hear(self, path: Sequence[int], said: Listed) -> None:
        """What was said behind the history and a path of drafts."""
        tokens = [*self.history, *path]
        for n in range(1, min(4, len(tokens)) + 1):
            self.lists.pop(tuple(tokens[-n:]), None)  # so that the latest stands last
            self.lists[tuple(tokens[-n:])] = said

    def copies(self, tokens: list[int]) -> tuple[Listed, int]:
        """What followed the longest suffix of 4 to 1 tokens in the history, and its length."""
        history = self.history
        for n in range(min(4, len(tokens)), 0, -1):
            ends = [e for e in range(n, len(history)) if history[e - n : e] == tokens[-n:]]
            followers = [history[e] for e in reversed(ends)][:8]
            if followers:
                total = sum(0.6**i for i in range(len(followers))) + 0.5
                share = {f: sum(0.6**i for i, g in enumerate(followers) if g == f) for f in followers}
                return [(f, math.log(s / total)) for f, s in share.items()], n
        return [], 0

    def features(self, path: Sequence[int]) -> tuple[dict[int, list[float]], int]:
        """The five features of each candidate behind a path, and the pattern."""
        tokens = [*self.history, *path][-4:]
        level = len(path)
        mask = self.masks[level] if level < len(self.masks) else []
        copied, length = self.copies(tokens)
        longest = [self.lists[g] for n in (4, 3, 2) if len(g := tuple(tokens[-n:])) == n and g in self.lists]
        sources = (
            mask,
            self.prior[tokens[-1]] if tokens[-1] < len(self.prior) else [],
            self.lists.get((tokens[-1],), []),
            longest[0] if longest else [],
            copied,
        )
        found: dict[int, list[float]] = {}
        for s, listed in enumerate(sources):
            for token, logprob in listed:
                found.setdefault(token, [0.0] * 5)[s] = max(0.0, logprob + (4.0 if s == 4 else 9.0))
        return found, 4 * (level + 1 if mask else 0) + min(3, length)

    def logprobs(self, path: Sequence[int], weights: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        """Candidates, and the log-probabilities of each and of something else, by weights [16, 6] float64."""
        found, pattern = self.features(path)
        x = torch.tensor(list(found.values()), dtype=torch.float64).reshape(-1, 5)
        scores = torch.cat([x @ weights[pattern, :5], weights[pattern, 5:]])
        return list(found), scores.log_softmax(dim=0)

    def tree(
        self, weights: torch.Tensor, budget: int, reach: Sequence[float], least: float
    ) -> list[tuple[int, int, int, float]]:
        """token, parent, ordinal and chance of each row."""
        nodes: list[tuple[float, int, list[int]]] = []  # chance, parent, path
        offers: list[tuple[float, int, int, int, list[int]]] = [(1.0, 0, 1, 0, [])]
        while offers and len(nodes) < budget:
            best = max(offers)  # ties: shallow ones, then those of earlier rows, then by rank
            offers.remove(best)
            chance, depth, above, _, path = best
            if nodes and (chance < least or chance == 0):
                break
            row = len(nodes)
            nodes.append((chance, -above, path))
            tokens, logprobs = self.logprobs(path, weights)
            order = sorted(range(len(tokens)), key=lambda i: -float(logprobs[i]))
            for rank, i in enumerate(order):
                p = chance * math.exp(float(logprobs[i]))
                offers.append((p, depth - 1, -row, -rank, [*path, tokens[i]]))
        kept = max(d for d in range(1, len(nodes) + 1) if d == 1 or self._fits(nodes[:d], budget, reach))
        deepest = self._deepest(nodes[:kept])
        masks = [0] * kept
        for _ in range(budget - kept):
            values = [deepest[v] * reach[m] if (m := masks[v]) < len(reach) else 0.0 for v in range(kept)]
            best_value = max(values)
            if best_value < least or best_value <= 0:
                break
            masks[values.index(best_value)] += 1
        rows = [(path[-1] if path else self.history[-1], above, 0, p) for p, above, path in nodes[:kept]]
        for v, count in enumerate(masks):
            for i in range(count):
                rows.append((-1, len(rows) - 1 if i else v, i + 1, deepest[v]))
        return rows

    @staticmethod
    def _deepest(nodes: list[tuple[float, int, list[int]]]) -> list[float]:
        return [p - sum(q for q, above, _ in nodes[1:] if above == v) for v, (p, _, _) in enumerate(nodes)]

    def _fits(self, nodes: list[tuple[float, int, list[int]]], budget: int, reach: Sequence[float]) -> bool:
        worth = sum(d * gain >= nodes[-1][0] for d in self._deepest(nodes) for gain in reach)
        return len(nodes) + worth <= budget


def random_block(
    rng: torch.Generator, root: int, rows: int, vocabulary: int, width: int
) -> tuple[torch.Tensor, ...]:
    """tokens, parent, mask_ordinal [rows], ids and logprobs [rows, width]: drafts, a mask, padding."""
    tokens = torch.randint(0, vocabulary, (rows,), generator=rng, dtype=torch.int32)
    parent = torch.tensor([-1, *(int(torch.randint(0, r, (), generator=rng)) for r in range(1, rows))]).int()
    ordinal = torch.zeros(rows, dtype=torch.int32)
    tokens[0] = root
    if rows > 3:
        parent[-2] = 0
        ordinal[-2], tokens[-2] = 1, -1
        parent[-1], ordinal[-1], tokens[-1] = -2, -1, -1
        parent[1:-2] = parent[1:-2].clamp(max=rows - 4)
    ids = torch.stack([torch.randperm(vocabulary, generator=rng)[:width] for _ in range(rows)]).int()
    logprobs = -12 * torch.rand((rows, width), generator=rng)
    return tokens, parent, ordinal, ids, logprobs.sort(dim=1, descending=True).values


def paths(tokens: torch.Tensor, parent: torch.Tensor) -> list[list[int]]:
    """The drafts above each row, its own token last; empty for the root."""
    found: list[list[int]] = []
    for r in range(len(tokens)):
        path, row = [], r
        while row > 0:
            path.insert(0, int(tokens[row]))
            row = int(parent[row])
        found.append(path)
    return found


def listed(ids: torch.Tensor, logprobs: torch.Tensor) -> Listed:
    return [(i, p) for i, p in zip(ids.tolist(), logprobs.tolist(), strict=True) if i >= 0]


def stacked(memories: Sequence[Memory]) -> Memory:
    return Memory(*(torch.cat(parts) for parts in zip(*memories, strict=True)))


@dataclass
class Case:
    """A batch of random sequences, as oracles and as the ops' arguments. The vocabulary is small: suffixes
    recur and sources agree. A sequence of no tokens is padded."""

    recalls: list[Recall]
    memory: Memory
    mask_ids: torch.Tensor
    mask_logprobs: torch.Tensor
    prior_ids: torch.Tensor
    prior_logprobs: torch.Tensor
    weights: torch.Tensor

    @property
    def sources(self) -> tuple[torch.Tensor, ...]:
        return self.mask_ids, self.mask_logprobs, self.prior_ids, self.prior_logprobs, self.weights


def random_case(
    seed: int,
    lengths: Sequence[int],
    masks: int = 3,
    candidates: int = 6,
    prior: tuple[int, int] = (8, 4),
    vocabulary: int = 10,
) -> Case:
    rng = torch.Generator().manual_seed(seed)

    def pick(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.stack([torch.randperm(vocabulary, generator=rng)[:width] for _ in range(rows)])
        logprobs = -12 * torch.rand((rows, width), generator=rng)
        return ids.int(), logprobs.sort(dim=1, descending=True).values

    size, width = prior
    prior_ids, prior_logprobs = (part[:size] for part in pick(max(1, size), width))
    recalls, memories, said = [], [], []
    for length in lengths:
        recall = Recall(prior=[listed(*one) for one in zip(prior_ids, prior_logprobs, strict=True)])
        memory = Memory.empty(1, 48, slots=1 << 14, width=5)
        none = torch.zeros((1, 0), dtype=torch.int32)
        tokens = torch.randint(0, vocabulary, (length,), generator=rng).int()
        begin = max(1, length // 2)
        block: tuple[torch.Tensor, ...] = (none, none, none, none[..., None], none[..., None].float())
        torch.ops.esp_kernels.remember_block(*memory, *block, tokens[None, :begin].contiguous())
        recall.history = tokens[:begin].tolist()
        if length > 1:
            drafted = random_block(rng, recall.history[-1], 8, vocabulary, 5)
            for path, ordinal, ids, logprobs in zip(paths(*drafted[:2]), *drafted[2:], strict=True):
                if ordinal == 0:
                    recall.hear(path, listed(ids, logprobs))
            rest = tokens[None, begin:].contiguous()
            torch.ops.esp_kernels.remember_block(
                *memory, *(part[None].contiguous() for part in drafted), rest
            )
            recall.history = tokens.tolist()
        ids, logprobs = pick(max(masks, 1), candidates)
        ids, logprobs = ids[:masks], logprobs[:masks]
        absent = int(torch.randint(0, masks + 2, (), generator=rng))  # the row had only so many masks
        ids[absent:] = -1
        recall.masks = [listed(*one) for one in zip(ids, logprobs, strict=True)]
        recalls.append(recall)
        memories.append(memory)
        said.append((ids, logprobs))
    mask_ids, mask_logprobs = (torch.stack(parts) for parts in zip(*said, strict=True))
    weights = torch.rand((len(lengths), 16, 6), generator=rng)
    weights[..., 5] *= 6
    return Case(recalls, stacked(memories), mask_ids, mask_logprobs, prior_ids, prior_logprobs, weights)
