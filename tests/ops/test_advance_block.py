"""advance_block against its parts written anew on Python lists, over many steps in place."""

import random

import pytest
import torch

import esp_kernels
from esp_kernels import PADDING, _backend
from esp_kernels.testing import strided

from . import oracle

VOCABULARY, WIDTH, CANDIDATES = 40, 24, 6
SHAPES = [  # rows, budget, masks, widths
    (1, 1, 0, None),
    (16, 1, 0, None),
    (10, 10, 1, None),
    (16, 12, 2, None),
    (64, 30, 1, None),
    (70, 66, 2, None),
    (12, 12, 2, [2, 1]),
    (16, 12, 1, [5]),
]


def int32(rows: object) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def layout(nodes: list[tuple[int, int]], count: int, masks: int, rows: int) -> dict[str, list[int]]:
    """The block of (token, parent) nodes, of `count` at most: their masks behind them, then padding."""
    spare = count - len(nodes)
    tokens = [token for token, _ in nodes] + [-1] * (rows - len(nodes))
    parent = [above for _, above in nodes] + [PADDING] * spare
    ordinal = [0] * len(nodes) + [-1] * spare
    for v in range(count):
        for i in range(1, masks + 1):
            parent.append(PADDING if v >= len(nodes) else v if i == 1 else len(parent) - 1)
            ordinal.append(i if v < len(nodes) else -1)
    parent += [PADDING] * (rows - len(parent))
    return {"tokens": tokens, "parent": parent, "mask_ordinal": ordinal + [-1] * (rows - len(ordinal))}


def best_nodes(
    root: int, levels: list[list[tuple[int, float]]], count: int, prune: bool
) -> list[tuple[int, int]]:
    """Best first, from all paths there are."""
    tree, scores, depths = [(root, -1)], [torch.tensor(0.0)], [0]
    while len(tree) < count:
        offers = []
        for v, (token, _) in enumerate(tree):
            taken = {t for t, above in tree if above == v}
            for rank, (t, logprob) in enumerate(levels[depths[v]] if depths[v] < len(levels) else []):
                if t not in taken and not (prune and t == token):
                    offers.append(
                        (-(scores[v] + logprob).item(), depths[v] + 1, v, rank, t, scores[v] + logprob)
                    )
        if not offers:
            break
        _, depth, v, _, t, score = min(offers, key=lambda o: o[:4])
        tree.append((t, v))
        scores.append(score)
        depths.append(depth)
    return tree


def static_nodes(root: int, levels: list, widths: list[int], prune: bool) -> list[tuple[int, int]]:
    tree, above = [(root, -1)], 0
    for level, width in zip(levels, widths, strict=False):
        first = len(tree)
        fitting = [t for t, _ in level if not (prune and t == tree[above][0])]
        tree += [(t, above) for t in fitting[:width]]
        above = first
    return tree


class Sequence:
    """What the op should make of one sequence, from its random candidates, step after step."""

    def __init__(self, root: int, rows: int, budget: int, masks: int, widths: list[int] | None, prune: bool):
        self.rows, self.masks, self.widths, self.prune = rows, masks, widths, prune
        self.nodes = budget // (masks + 1) if widths is None else 1 + sum(widths)
        self.block = layout([(root, -1)] if root >= 0 else [], self.nodes, masks, rows)

    def advance(self, ids: list[list[int]], logprobs: torch.Tensor) -> tuple[list[int], list[int]]:
        block = self.block
        if block["mask_ordinal"][0] != 0:
            return [], []
        path = [0]
        while True:
            children = [r for r in range(self.nodes) if block["parent"][r] == path[-1]]
            follower = [r for r in children if block["tokens"][r] == ids[path[-1]][0]]
            if not follower:
                break
            path.append(follower[0])
        committed = [ids[r][0] for r in path]
        first = self.nodes + path[-1] * self.masks
        levels = [list(zip(ids[r], logprobs[r], strict=True)) for r in range(first, first + self.masks)]
        if self.widths is None:
            tree = best_nodes(committed[-1], levels, self.nodes, self.prune)
        else:
            tree = static_nodes(committed[-1], levels, self.widths, self.prune)
        self.block = layout(tree, self.nodes, self.masks, self.rows)
        return path, committed


def guesses(batch: int, rows: int, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Few tokens, so that drafts come true, and some equal log-probabilities."""
    ids = [[rng.sample(range(CANDIDATES + 1), CANDIDATES) for _ in range(rows)] for _ in range(batch)]
    logprobs = torch.randn(batch, rows, CANDIDATES).abs().mul(-2).round(decimals=1)
    return int32(ids), logprobs.sort(-1, descending=True).values.contiguous()


def tensors_of(sequences: list[Sequence]) -> dict[str, torch.Tensor]:
    block = {name: int32([s.block[name] for s in sequences]) for name in sequences[0].block}
    ancestors, depth = oracle.metadata(block["parent"].tolist())
    return block | {"depth": depth, "ancestors": ancestors}


@pytest.mark.parametrize("prune", [True, False])
@pytest.mark.parametrize(("rows", "budget", "masks", "widths"), SHAPES)
def test_step_after_step(rows, budget, masks, widths, prune, backend, rng):
    roots = [3, -1, 5]
    sequences = [Sequence(root, rows, budget, masks, widths, prune) for root in roots]
    block = tensors_of(sequences)
    embedding = torch.randn(VOCABULARY, WIDTH)
    probe = torch.randn(len(roots), masks, WIDTH)
    expected_probe = probe.clone()
    accepted_drafts = 0
    for _ in range(3 if backend == "triton" else 12):
        ids, logprobs = guesses(len(roots), rows, rng)
        path, accepted, committed = esp_kernels.advance_block(
            ids,
            logprobs,
            *block.values(),
            probe,
            embedding,
            0.1,
            budget,
            masks,
            widths,
            prune,
            backend=backend,
        )
        for b, sequence in enumerate(sequences):
            line, tokens = sequence.advance(ids[b].tolist(), logprobs[b])
            spare = [-1] * (rows - len(line))
            assert path[b].tolist() == line + spare and committed[b].tolist() == tokens + spare
            assert accepted[b] == len(line) - 1
            accepted_drafts += max(0, len(line) - 1)
            for token in tokens:
                expected_probe[b] += 0.1 * (embedding[token] - expected_probe[b])
        for name, expected in tensors_of(sequences).items():
            assert torch.equal(block[name], expected), name
        torch.testing.assert_close(probe, expected_probe)
    assert accepted_drafts > 0 or rows < 10 or masks == 0 or backend == "triton"


@pytest.mark.parametrize(
    ("rows", "budget", "masks", "widths", "candidates", "width", "dtype"),
    [
        (64, 60, 1, None, 50, 7, torch.float32),
        (64, 60, 3, [7, 5, 2], 33, 64, torch.float32),
        (130, 128, 0, None, 1, 8, torch.float16),
        (256, 256, 1, None, 130, 4, torch.bfloat16),
        (200, 180, 2, [40, 19], 65, 5, torch.bfloat16),
        (256, 255, 2, None, 40, 4, torch.float32),
        (63, 63, 62, None, 3, 4, torch.float16),
    ],
)
def test_large_blocks_of_dirty_candidates(
    rows, budget, masks, widths, candidates, width, dtype, backend, rng
):
    """Candidates that may not be drafted, ties, and probes and embeddings of any stride."""
    if backend == "ref":
        pytest.skip("it is what the others are held to")
    if backend == "triton" and (rows > 64 or masks > 3):
        pytest.skip("too slow, interpreted")
    sequences = [Sequence(root, rows, budget, masks, widths, True) for root in (3, -1, 7)]
    block, batch = tensors_of(sequences), len(sequences)
    embedding = strided(torch.randn(300, width).to(dtype), gap=4)
    probe = strided(torch.randn(batch, masks + 1, width), gap=1)
    expected_probe, expected_block = probe.clone(), {name: t.clone() for name, t in block.items()}
    for _ in range(2 if backend == "triton" else 3):
        ids = torch.stack([torch.randperm(300)[:candidates] for _ in range(batch * rows)]).int()
        ids = ids.view(batch, rows, candidates)
        logprobs = torch.randn(ids.shape).abs().mul(-3).round().sort(-1, descending=True).values
        ids[..., 1:][torch.rand(ids[..., 1:].shape) < 0.2] = -1
        logprobs[..., 1:][torch.rand(ids[..., 1:].shape) < 0.1] = -torch.inf
        logprobs[torch.rand(ids.shape) < 0.1] = torch.nan
        ids[:, 0, 0] = block["tokens"][:, 1] if rows > 1 and budget > 1 else 5
        results = []
        for name, rows_of_block, vectors in (
            (backend, block, probe),
            ("ref", expected_block, expected_probe),
        ):
            results.append(
                esp_kernels.advance_block(
                    ids, logprobs.contiguous(), *rows_of_block.values(), vectors, embedding, 0.1, budget,
                    masks, widths, backend=name,
                )
            )  # fmt: skip
        assert all(map(torch.equal, *results))
        for name, expected in expected_block.items():
            assert torch.equal(block[name], expected), name
        torch.testing.assert_close(probe, expected_probe)


@pytest.mark.parametrize(("rows", "masks", "drafts"), [(63, 2, 9), (256, 2, 50)])
def test_all_candidates_are_equally_likely(rows, masks, drafts, backend):
    """Then the rows with the first parents win, however many rows make the same offer."""
    if backend == "triton" and rows > 64:
        pytest.skip("too slow, interpreted")
    sequence = Sequence(99, rows, rows, masks, None, True)
    ids = torch.arange(drafts, dtype=torch.int32).expand(1, rows, drafts).contiguous()
    block = tensors_of([sequence])
    esp_kernels.advance_block(
        ids, torch.zeros(ids.shape), *block.values(), torch.zeros(1, masks, WIDTH),
        torch.zeros(100, WIDTH), 0.1, rows, masks, backend=backend,
    )  # fmt: skip
    sequence.advance(ids[0].tolist(), torch.zeros(rows, drafts))
    for name, expected in tensors_of([sequence]).items():
        assert torch.equal(block[name], expected), name


def test_lam_0_leaves_the_probe_alone(backend, rng):
    sequence = Sequence(3, 10, 10, 1, None, True)
    probe = torch.full((1, 1, WIDTH), torch.nan)
    ids, logprobs = guesses(1, 10, rng)
    block = tensors_of([sequence]).values()
    embedding = torch.full((VOCABULARY, WIDTH), torch.inf)
    esp_kernels.advance_block(ids, logprobs, *block, probe, embedding, 0.0, 10, 1, backend=backend)
    assert probe.isnan().all()


def arguments(**changes: object) -> dict[str, object]:
    ids, logprobs = guesses(2, 12, random.Random(0))
    block = tensors_of([Sequence(3, 12, 12, 2, None, True) for _ in range(2)])
    tensors = {"ids": ids, "logprobs": logprobs, **block}
    tensors |= {"probe": torch.zeros(2, 2, WIDTH), "embedding": torch.zeros(VOCABULARY, WIDTH)}
    return tensors | {"lam": 0.1, "budget": 12, "masks": 2} | changes


@pytest.mark.on_host
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ids": 3}, "ids must be a tensor, got int"),
        ({"ids": torch.zeros(2, 12, 6)}, "ids must be int32, got float32"),
        ({"ids": int32([[[]] * 12] * 2)}, "ids must have at least 1 candidate a row, got 0"),
        ({"logprobs": torch.zeros(2, 12, 5)}, "logprobs must have shape [2, 12, 6], got [2, 12, 5]"),
        ({"tokens": int32([[0] * 11] * 2)}, "tokens must have shape [2, 12], got [2, 11]"),
        ({"parent": int32([[0] * 12])}, "parent must have shape [2, 12], got [1, 12]"),
        ({"mask_ordinal": torch.zeros(2, 12)}, "mask_ordinal must be int32, got float32"),
        ({"depth": int32([[0] * 2] * 12).t()}, "depth must be contiguous, got strides [1, 2]"),
        ({"ancestors": int32([[[0]] * 12] * 2)}, "ancestors must be int64, got int32"),
        ({"embedding": torch.zeros(4)}, "embedding must have shape [*, *], got [4]"),
        ({"probe": torch.zeros(2, 2, 9)}, "probe must have shape [2, *, 24], got [2, 2, 9]"),
        ({"probe": torch.zeros(2, 1, WIDTH)}, "probe must have a vector for each of 2 masks, got 1"),
        ({"lam": 1.5}, "lam must be in 0..1, got 1.5"),
        ({"budget": 13}, "budget must be 1 to 12, the rows of the block, got 13"),
        ({"masks": 12}, "masks must be 0 to 11 with a budget of 12, got 12"),
        ({"widths": [1, 1, 1]}, "widths must have at most 2 levels, as ids has, got 3"),
        ({"widths": [3, 1]}, "widths [3, 1] with 2 masks need 15 rows, budget is 12"),
        (
            {"embedding": torch.zeros(2, WIDTH)},
            "ids[0, 0, 0] must be -1 or in the vocabulary of 2 tokens, got 6",
        ),
        (
            {"mask_ordinal": int32([[0, 0, 0, 0, 0] + [-1] * 7] * 2)},
            "mask_ordinal[0, 4] must not be 0, with 4 nodes tokens are rows 0..3",
        ),
    ],
)
def test_bad_input(changes, sentence, backend):
    with pytest.raises(ValueError) as error:
        esp_kernels.advance_block(**arguments(**changes), backend=backend)
    assert str(error.value) == sentence


def test_cuda_says_how_many_rows_it_takes():
    if not _backend.has_cuda_kernel("advance_block", "cpu"):
        pytest.skip("no emulated kernels")
    block = tensors_of([Sequence(3, 2049, 12, 2, None, True)])
    ids, logprobs = guesses(1, 2049, random.Random(0))
    changes = {"ids": ids, "logprobs": logprobs, **block, "probe": torch.zeros(1, 2, WIDTH)}
    with pytest.raises(
        ValueError, match="backend 'cuda' cannot serve advance_block: it takes at most 2048 rows, got 2049"
    ):
        esp_kernels.advance_block(**arguments(**changes), backend="cuda")


def test_opcheck():
    torch.library.opcheck(torch.ops.esp_kernels.advance_block.default, (), arguments())
