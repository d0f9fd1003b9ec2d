import itertools
import math
import random

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import esp_kernels
from esp_kernels import PADDING

Level = list[tuple[int, float]]
Node = tuple[int, int, float]  # token, parent's row, cumulative log-probability; a row's number is its place


def children(node: Node, level: Level, prune: bool) -> list[tuple[int, float]]:
    """Tokens and cumulative log-probabilities of what may hang from a node, best first."""
    token, _, score = node
    found = []
    for candidate, logprob in level:
        total = numpy.float32(score) + min(numpy.float32(logprob), numpy.float32(0))
        usable = candidate >= 0 and math.isfinite(logprob) and math.isfinite(total)
        if usable and not (prune and candidate == token):
            found.append((candidate, float(total)))
    return found


def algorithm1(root: int, levels: list[Level], nodes: int, prune: bool) -> list[Node]:
    """The paper's, with B = nodes: keep the B - i best of each depth i, then the B - 1 best of all."""
    kept: list[Node] = [(root, -1, 0.0)]  # parents are places in this list
    frontier = [0]
    for i, level in enumerate(levels, start=1):
        below = [
            (token, v, score)
            for v in frontier
            for token, score in children(kept[v], level, prune)[: max(0, nodes - i)]
        ]
        best = sorted(below, key=lambda node: -node[2])[: max(0, nodes - i)]
        frontier = list(range(len(kept), len(kept) + len(best)))
        kept += best
    order = sorted(range(len(kept)), key=lambda place: -kept[place][2])[:nodes]
    row = {place: r for r, place in enumerate(order)}
    return [(token, row[v] if v >= 0 else -1, score) for token, v, score in (kept[place] for place in order)]


def by_definition(root: int, levels: list[Level], nodes: int, prune: bool) -> list[Node]:
    """One after the other the first of all possible drafts in the documented order."""
    tree: list[Node] = [(root, -1, 0.0)]
    depth = [0]
    open_drafts: list[tuple[float, int, int, int, int]] = []
    while True:
        row = len(tree) - 1
        if depth[row] < len(levels):
            for rank, (token, score) in enumerate(children(tree[row], levels[depth[row]], prune)):
                open_drafts.append((-score, depth[row] + 1, row, rank, token))
        if len(tree) == nodes or not open_drafts:
            return tree
        draft = min(open_drafts)
        open_drafts.remove(draft)
        tree.append((draft[4], draft[2], -draft[0]))
        depth.append(draft[1])


def static_tree(root: int, levels: list[Level], widths: list[int], prune: bool) -> list[Node | None]:
    tree: list[Node | None] = [(root, -1, 0.0)]
    best = 0
    for level, width in zip(levels, widths, strict=False):
        node = tree[best]
        below = children(node, level, prune)[:width] if node else []
        place, best = best, len(tree)
        tree += [(token, place, score) for token, score in below] + [None] * (width - len(below))
    return tree


def block(tree: list[Node | None], nodes: int, masks: int) -> list[tuple[int, int, int]]:
    """Rows (token, parent, mask_ordinal) of a drafted tree."""
    tree = tree + [None] * (nodes - len(tree))
    rows = [(node[0], node[1], 0) if node else (-1, PADDING, -1) for node in tree]
    for v, node in enumerate(tree):
        above = v
        for i in range(1, masks + 1):
            rows.append((-1, above, i) if node else (-1, PADDING, -1))
            above = len(rows) - 1
    return rows


def random_levels(levels: int, candidates: int, rng: random.Random) -> list[Level]:
    """Few tokens, so that pruning bites; many ties; now and then what may not be drafted."""
    tied, dirty = rng.random() < 0.5, rng.random() < 0.3
    drawn = []
    for _ in range(levels):
        above = rng.choice([0.0, 0.0, 0.0, 0.5])
        logprobs = [above - (rng.randrange(5) / 4 if tied else rng.expovariate(1)) for _ in range(candidates)]
        level = list(zip(rng.sample(range(candidates + 2), candidates), logprobs, strict=True))
        level.sort(key=lambda candidate: -candidate[1])
        for n in range(candidates):
            if dirty and rng.random() < 0.3:
                wrong = rng.choice([math.nan, -math.inf, math.inf])
                level[n] = (level[n][0], wrong) if rng.random() < 0.5 else (-1, rng.choice([0.0, wrong]))
        drawn.append(level)
    return drawn


def tensors(roots: list[int], sequences: list[list[Level]]) -> tuple[torch.Tensor, ...]:
    levels = sequences[0]
    shape = (len(sequences), len(levels), len(levels[0]) if levels else 0)
    flat = [candidate for levels in sequences for level in levels for candidate in level]
    return (
        torch.tensor(roots, dtype=torch.int32),
        torch.tensor([token for token, _ in flat], dtype=torch.int32).view(shape),
        torch.tensor([logprob for _, logprob in flat], dtype=torch.float32).view(shape),
    )


def rows_of(result: tuple[torch.Tensor, ...], b: int) -> list[tuple[int, int, int]]:
    return list(zip(*(t[b].tolist() for t in result), strict=True))


def on_all(*arguments: object, interpreted: bool) -> list[tuple[torch.Tensor, ...]]:
    """The results of ref and cpp, to which those of interpreted Triton, which is slow, are equal too."""
    backends = ("ref", "cpp", "triton") if interpreted else ("ref", "cpp")
    ref, *others = (esp_kernels.expand_tree(*arguments, backend=backend) for backend in backends)
    assert all(torch.equal(a, b) for other in others for a, b in zip(ref, other, strict=True))
    return [ref, others[0]]


@settings(deadline=None, max_examples=150)
@given(
    st.integers(1, 40), st.integers(0, 3), st.integers(0, 4), st.integers(0, 9), st.booleans(),
    st.integers(0, 2**32),
)  # fmt: skip
def test_dynamic_tree(nodes, masks, levels, candidates, prune, seed):
    rng = random.Random(seed)
    roots = [rng.choice([-1, 0, 1, 2]) for _ in range(3)]
    sequences = [random_levels(levels, candidates, rng) for _ in roots]
    root, ids, logprobs = tensors(roots, sequences)
    budget = nodes * (masks + 1) + rng.randrange(masks + 1)
    ref, cpp = on_all(root, ids, logprobs, budget, masks, None, prune, interpreted=seed % 3 == 0)
    assert all(t.shape == (3, nodes * (masks + 1)) and t.dtype == torch.int32 for t in ref)
    assert all(t.is_contiguous() for t in ref)
    for b, exact_levels in enumerate(as_float32(sequences)):
        oracle = algorithm1(roots[b], exact_levels, nodes, prune) if roots[b] >= 0 else []
        assert rows_of(cpp, b) == block(oracle, nodes, masks)
        if oracle:
            assert by_definition(roots[b], exact_levels, nodes, prune) == oracle


def as_float32(sequences: list[list[Level]]) -> list[list[Level]]:
    return [[[(t, float(numpy.float32(p))) for t, p in level] for level in levels] for levels in sequences]


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(1, 9), max_size=4), st.integers(0, 3), st.integers(0, 2), st.integers(0, 9),
    st.booleans(), st.integers(0, 2**32),
)  # fmt: skip
def test_static_tree(widths, masks, more_levels, candidates, prune, seed):
    rng = random.Random(seed)
    roots = [rng.choice([-1, 0, 1, 2]) for _ in range(3)]
    sequences = [random_levels(len(widths) + more_levels, candidates, rng) for _ in roots]
    nodes = 1 + sum(widths)
    budget = nodes * (masks + 1) + rng.randrange(5)
    arguments = (*tensors(roots, sequences), budget, masks, widths, prune)
    ref, cpp = on_all(*arguments, interpreted=seed % 3 == 0)
    assert all(t.shape == (3, nodes * (masks + 1)) and t.dtype == torch.int32 for t in ref)
    assert all(t.is_contiguous() for t in ref)
    for b, exact_levels in enumerate(as_float32(sequences)):
        oracle = static_tree(roots[b], exact_levels, widths, prune) if roots[b] >= 0 else []
        assert rows_of(cpp, b) == block(oracle, nodes, masks)


@pytest.mark.parametrize("prune", [True, False])
def test_no_tree_of_that_size_is_more_likely(prune, backend, rng):
    """Brute force over every tree with 6 nodes of the 12 that there could be."""
    for _ in range(10):
        chances = [(0.5 + 0.1 * rng.random(), 0.3, 0.05) for _ in range(2)]
        levels = [[(3 * rng.randrange(3) + n, math.log(p)) for n, p in enumerate(c)] for c in chances]
        root = rng.randrange(9)
        everything = by_definition(root, levels, 13, prune)
        best = max(
            sum(math.exp(everything[v][2]) for v in chosen)
            for chosen in itertools.combinations(range(1, len(everything)), 5)
            if all(everything[v][1] in (0, *chosen) for v in chosen)
        )
        tokens, parent, _ = esp_kernels.expand_tree(
            *tensors([root], [levels]), 6, 0, prune=prune, backend=backend
        )
        score, total = {0: 0.0}, 0.0
        depth, _ = esp_kernels.tree_metadata(parent)
        for r in range(1, 6):
            level = dict(levels[int(depth[0, r]) - 1])
            score[r] = score[int(parent[0, r])] + level[int(tokens[0, r])]
            total += math.exp(score[r])
        assert total == pytest.approx(best, rel=1e-5)


def test_ties_go_to_the_shallower_then_the_earlier_parent_then_the_better_rank(backend):
    levels = [[(10, 0.0), (11, 0.0)], [(20, 0.0), (21, 0.0)]]
    tokens, parent, _ = esp_kernels.expand_tree(*tensors([1], [levels]), 7, 0, backend=backend)
    assert tokens.tolist() == [[1, 10, 11, 20, 21, 20, 21]]
    assert parent.tolist() == [[-1, 0, 0, 1, 1, 2, 2]]


def test_depth_beats_breadth_where_it_is_likelier(backend):
    levels = [[(10, -0.1), (11, -2.5)], [(20, -0.1), (21, -2.5)], [(30, -0.1), (31, -2.5)]]
    tokens, parent, ordinal = esp_kernels.expand_tree(*tensors([1], [levels]), 11, 1, backend=backend)
    assert tokens.tolist() == [[1, 10, 20, 30, 11] + [-1] * 5]
    assert parent.tolist() == [[-1, 0, 1, 2, 0, 0, 1, 2, 3, 4]]
    assert ordinal.tolist() == [[0] * 5 + [1] * 5]


def test_pruning_lets_the_next_best_in(backend):
    levels = [[(5, -0.1), (6, -1.0), (7, -2.0)], [(6, -0.1), (5, -1.0), (8, -3.0)]]
    pruned = esp_kernels.expand_tree(*tensors([5], [levels]), 6, 0, [2, 3], backend=backend)
    assert pruned[0].tolist() == [[5, 6, 7, 5, 8, -1]]
    assert pruned[1].tolist() == [[-1, 0, 0, 1, 1, PADDING]]
    kept = esp_kernels.expand_tree(*tensors([5], [levels]), 6, 0, [2, 3], False, backend=backend)
    assert kept[0].tolist() == [[5, 5, 6, 6, 5, 8]]
    assert kept[1].tolist() == [[-1, 0, 0, 1, 1, 1]]


@pytest.mark.parametrize(
    ("masks", "widths", "rows"), [(1, [29], 60), (2, [15, 4], 60), (3, [7, 5, 2], 60), (3, [7, 5, 3], 64)]
)
def test_static_trees_of_the_paper_s_sizes_fill_their_budget(masks, widths, rows, backend, rng):
    root, ids = torch.tensor([0], dtype=torch.int32), torch.arange(1, 31, dtype=torch.int32)
    ids = ids.expand(1, masks, 30).contiguous()
    logprobs = torch.randn(1, masks, 30).log_softmax(-1).sort(descending=True).values
    block = esp_kernels.expand_tree(root, ids, logprobs, rows, masks, widths, backend=backend)
    assert all(t.shape == (1, rows) for t in block)
    assert (block[2] >= 0).all() and not (block[1] == PADDING).any()


def test_the_block_is_what_metadata_and_verification_take(backend, rng):
    nodes, masks = 13, 4
    sequences = [random_levels(4, 6, rng) for _ in range(8)]
    roots = [0, 1, 2, 3, -1, 0, 1, 2]
    tokens, parent, ordinal = esp_kernels.expand_tree(
        *tensors(roots, sequences), nodes * (masks + 1), masks, backend=backend
    )
    depth, ancestors = esp_kernels.tree_metadata(parent, backend=backend)
    drafts, mask_rows = depth[:, :nodes, None], depth[:, nodes:].unflatten(1, (nodes, masks))
    real = (drafts >= 0).expand_as(mask_rows)
    assert torch.equal(mask_rows[real], (drafts + torch.arange(1, masks + 1))[real])
    assert (mask_rows[~real] == -1).all() and not ancestors[depth == -1].any()

    leaf = depth[:, :nodes].argmax(1)
    choice = torch.full_like(tokens, 10**6)
    for b, r in enumerate(leaf.tolist()):
        while r > 0:
            r, token = int(parent[b, r]), tokens[b, r]
            choice[b, r] = token
    path, accepted, bonus = esp_kernels.verify_tree(choice, tokens, parent, ordinal, backend=backend)
    assert accepted.tolist() == depth[:, :nodes].amax(1).tolist()
    padded = torch.tensor(roots) < 0
    assert (path[padded] == -1).all() and (bonus[padded] == -1).all() and (bonus[~padded] == 10**6).all()


def test_candidates_run_out(backend):
    levels = [[(10, -0.5), (11, -math.inf)], [(20, math.nan), (21, -0.5)]]
    tokens, parent, ordinal = esp_kernels.expand_tree(*tensors([1], [levels]), 10, 1, backend=backend)
    assert tokens.tolist() == [[1, 10, 21] + [-1] * 7]
    assert parent.tolist() == [[-1, 0, 1, PADDING, PADDING, 0, 1, 2, PADDING, PADDING]]
    assert ordinal.tolist() == [[0, 0, 0, -1, -1, 1, 1, 1, -1, -1]]


def test_sums_that_overflow_are_not_drafted(backend):
    levels = [[(10, -3e38)], [(20, -3e38)]]
    for widths in (None, [1, 1]):
        tokens, *_ = esp_kernels.expand_tree(*tensors([1], [levels]), 3, 0, widths, backend=backend)
        assert tokens.tolist() == [[1, 10, -1]]


def test_above_zero_counts_as_zero(backend):
    levels = [[(10, 1e-7), (11, 0.0)], [(20, 0.5), (21, 0.25)]]
    tokens, parent, _ = esp_kernels.expand_tree(*tensors([1], [levels]), 6, 0, backend=backend)
    assert tokens.tolist() == [[1, 10, 11, 20, 21, 20]]
    assert parent.tolist() == [[-1, 0, 0, 1, 1, 2]]


@pytest.mark.parametrize(("batch", "levels", "candidates"), [(0, 2, 3), (2, 0, 3), (2, 3, 0)])
def test_empty(batch, levels, candidates, backend):
    root = torch.zeros(batch, dtype=torch.int32)
    ids = torch.zeros(batch, levels, candidates, dtype=torch.int32)
    for widths, nodes in ((None, 5), ([2] * min(levels, 2), 1 + 2 * min(levels, 2))):
        tokens, parent, ordinal = esp_kernels.expand_tree(
            root, ids, torch.zeros(ids.shape), 10, 1, widths, backend=backend
        )
        assert tokens.tolist() == [[0] + [-1] * (2 * nodes - 1)] * batch
        assert parent.tolist() == [[-1] + [PADDING] * (nodes - 1) + [0] + [PADDING] * (nodes - 1)] * batch
        assert ordinal.tolist() == [[0] + [-1] * (nodes - 1) + [1] + [-1] * (nodes - 1)] * batch


def test_the_largest_budget(rng):
    sequences = [[sorted(((n, -rng.expovariate(1)) for n in range(70)), key=lambda c: -c[1])] * 3]
    arguments = (*tensors([3], sequences), 4096, 0)
    ref, cpp = (esp_kernels.expand_tree(*arguments, backend=backend) for backend in ("ref", "cpp"))
    assert all(map(torch.equal, ref, cpp)) and (cpp[2] == 0).all()


@pytest.mark.parametrize("levels", [1, 3])
def test_a_large_budget(levels, backend, rng):
    """The rows of a block of 300, from 70 candidates a level."""
    sequences = [[sorted(((n, -rng.expovariate(1)) for n in range(70)), key=lambda c: -c[1])] * levels]
    arguments = (*tensors([3], sequences), 300, 2)
    tree = esp_kernels.expand_tree(*arguments, backend=backend)
    assert all(map(torch.equal, tree, esp_kernels.expand_tree(*arguments, backend="ref")))


def test_the_largest_block_of_siblings(backend, rng):
    """4096 rows, 128 candidates: the root's children in one pass."""
    level = sorted(((n, -rng.expovariate(1)) for n in range(128)), key=lambda c: -c[1])
    arguments = (*tensors([3], [[level]]), 4096, 0)
    assert rows_of(esp_kernels.expand_tree(*arguments, backend=backend), 0) == block(
        algorithm1(3, as_float32([[level]])[0], 4096, True), 4096, 0
    )


def test_a_long_static_tree(backend, rng):
    sequences = [random_levels(63, 5, rng) for _ in range(2)]
    widths = [rng.randrange(1, 4) for _ in range(63)]
    nodes = 1 + sum(widths)
    result = esp_kernels.expand_tree(*tensors([0, 1], sequences), nodes, 0, widths, False, backend=backend)
    for b, levels in enumerate(as_float32(sequences)):
        assert rows_of(result, b) == block(static_tree(b, levels, widths, False), nodes, 0)


@pytest.mark.parametrize("widths", [None, [2, 2]])
def test_a_level_without_usable_candidates_ends_the_tree(widths, backend):
    """The level below is not hung from anything else."""
    levels = [[(10, -0.5), (11, -1.0)], [(-1, 0.0), (-1, 0.0)], [(30, -0.1), (31, -0.2)]]
    tokens, *_ = esp_kernels.expand_tree(
        *tensors([1], [levels]),
        5 if widths is None else 7,
        0,
        widths and [*widths, 2],
        False,
        backend=backend,
    )
    assert [t for t in tokens[0].tolist() if t >= 0] == [1, 10, 11]


def test_a_sequence_does_not_depend_on_its_neighbours(rng):
    roots = [rng.choice([-1, 0, 1, 2]) for _ in range(300)]
    root, ids, logprobs = tensors(roots, [random_levels(3, 9, rng) for _ in roots])
    for widths in (None, [7, 5, 3]):
        whole = esp_kernels.expand_tree(root, ids, logprobs, 64, 3, widths)
        threads = torch.get_num_threads()
        try:
            for count in (1, 2):
                torch.set_num_threads(count)
                again = esp_kernels.expand_tree(root, ids, logprobs, 64, 3, widths)
                assert all(map(torch.equal, again, whole))
        finally:
            torch.set_num_threads(threads)
        for b in range(0, 300, 29):
            one = slice(b, b + 1)
            alone = esp_kernels.expand_tree(root[one], ids[one], logprobs[one], 64, 3, widths)
            assert all(torch.equal(a, t[one]) for a, t in zip(alone, whole, strict=True))


@pytest.mark.parametrize("widths", [None, [3, 2]])
def test_reference_never_reads_values_on_the_host(widths):
    root = torch.empty(2, dtype=torch.int32, device="meta")
    ids = torch.empty(2, 2, 5, dtype=torch.int32, device="meta")
    block = esp_kernels.expand_tree(root, ids, ids.float(), 18, 2, widths, backend="ref")
    assert all(t.shape == (2, 18) for t in block)


def logprobs(*values: float) -> torch.Tensor:
    return torch.tensor([[values, [-1.0] * 4]] * 2)


@pytest.mark.on_host
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"root": [1]}, "root must be a tensor, got list"),
        ({"root": torch.zeros(2)}, "root must be int32, got float32"),
        ({"root": torch.zeros(2, 1, dtype=torch.int32)}, "root must have shape [*], got [2, 1]"),
        ({"ids": torch.zeros(2, 2, 4)}, "ids must be int32, got float32"),
        ({"ids": torch.zeros(3, 2, 4, dtype=torch.int32)}, "ids must have shape [2, *, *], got [3, 2, 4]"),
        (
            {"ids": torch.zeros(2, 4, 2, dtype=torch.int32).mT},
            "ids must be contiguous, got strides [8, 1, 2]",
        ),
        ({"logprobs": torch.zeros(2, 2, 4).half()}, "logprobs must be float32, got float16"),
        ({"logprobs": torch.zeros(2, 2, 3)}, "logprobs must have shape [2, 2, 4], got [2, 2, 3]"),
        (
            {"logprobs": torch.zeros(2, 4, 2).mT},
            "logprobs must be contiguous, got strides [8, 1, 2]",
        ),
        ({"budget": 0, "masks": 0}, "budget must be 1 to 4096, got 0"),
        ({"budget": 4097}, "budget must be 1 to 4096, got 4097"),
        ({"masks": -1}, "masks must be 0 to 29 with a budget of 30, got -1"),
        ({"masks": 30}, "masks must be 0 to 29 with a budget of 30, got 30"),
        ({"widths": [3, 2, 1]}, "widths must have at most 2 levels, as ids has, got 3"),
        ({"widths": [3, 0]}, "widths must each be 1 to 4096, got 0"),
        ({"widths": [2**62, 2**62]}, f"widths must each be 1 to 4096, got {2**62}"),
        ({"widths": [15, 4]}, "widths [15, 4] with 2 masks need 60 rows, budget is 30"),
        (
            {"logprobs": logprobs(-0.125, math.nan, -0.0625, -0.5)},
            "logprobs must descend in each level, got -0.0625 after -0.125 at logprobs[0, 0, 2]",
        ),
        (
            {"logprobs": logprobs(-1, -2, -1e-10, 0), "root": torch.tensor([-1, 0], dtype=torch.int32)},
            "logprobs must descend in each level, got -1e-10 after -2 at logprobs[1, 0, 2]",
        ),
    ],
)
def test_bad_input(change, sentence, backend):
    arguments = {
        "root": torch.zeros(2, dtype=torch.int32),
        "ids": torch.zeros(2, 2, 4, dtype=torch.int32),
        "logprobs": torch.zeros(2, 2, 4),
        "budget": 30,
        "masks": 2,
    }
    with pytest.raises(ValueError) as error:
        esp_kernels.expand_tree(**(arguments | change), backend=backend)
    assert str(error.value) == sentence


def test_devices_must_agree():
    root, ids = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 2, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^logprobs must be on cpu, got meta$"):
        esp_kernels.expand_tree(root, ids, torch.zeros(2, 2, 4, device="meta"), 30, 2, backend="ref")


def test_opcheck():
    root, ids, logprobs = tensors([1], [[[(10, -0.5), (11, -1.0)], [(20, -0.5), (21, -1.0)]]])
    op = torch.ops.esp_kernels.expand_tree.default
    torch.library.opcheck(op, (root, ids, logprobs, 12, 2))
    torch.library.opcheck(op, (root, ids, logprobs, 12, 2, [2, 1], False))
