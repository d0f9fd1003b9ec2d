import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import esp_kernels
from esp_kernels import PADDING
from esp_kernels.testing import random_tree

Block = dict[str, list[list[int]]]


def random_sequence(rows: int, vocabulary: int, rng: random.Random) -> dict[str, list[int]]:
    """Token rows with few distinct tokens, mask rows and padding; the last two tempt the walk with tokens
    that match."""
    parent = random_tree(rows, rng, rng.randrange(rows), rng.choice([1, 3, rows]))
    ordinal = [-1 if p == PADDING else 0 for p in parent]
    for r in range(1, rows):
        above = ordinal[parent[r]] if parent[r] >= 0 else -1
        if above > 0 or (above == 0 and rng.random() < 0.2):
            ordinal[r] = above + 1
        if parent[r] == PADDING and rng.random() < 0.5:
            parent[r] = rng.randrange(r)
    tokens = [rng.randrange(vocabulary) for _ in range(rows)]
    choice = [rng.randrange(vocabulary) for _ in range(rows)]
    return {"choice": choice, "tokens": tokens, "parent": parent, "mask_ordinal": ordinal}


def longest_consistent_path(
    choice: list[int], tokens: list[int], parent: list[int], mask_ordinal: list[int]
) -> list[int]:
    """Of all rows' paths from the root, the longest on which every step is the one to take."""
    if not choice or mask_ordinal[0] != 0:
        return []

    def to_take(child: int, row: int) -> bool:
        siblings = [r for r in range(len(parent)) if parent[r] == row and mask_ordinal[r] == 0]
        return child == min((r for r in siblings if tokens[r] == choice[row]), default=None)

    paths = []
    for row in range(len(parent)):
        path = [row]
        while path[0] != 0 and parent[path[0]] >= 0:
            path.insert(0, parent[path[0]])
        if path[0] == 0 and all(to_take(c, r) for r, c in itertools.pairwise(path)):
            paths.append(path)
    return max(paths, key=len)


def run(block: Block, backend: str) -> list[torch.Tensor]:
    tensors = {name: torch.tensor(rows, dtype=torch.int32) for name, rows in block.items()}
    return list(esp_kernels.verify_tree(**tensors, backend=backend))


def assert_walks(block: Block, backend: str) -> None:
    path, accepted, bonus = run(block, backend)
    assert path.dtype == accepted.dtype == bonus.dtype == torch.int32
    assert path.is_contiguous() and accepted.is_contiguous() and bonus.is_contiguous()
    for b, sequence in enumerate(zip(*block.values(), strict=True)):
        expected = longest_consistent_path(*sequence)
        assert path[b].tolist() == expected + [-1] * (path.shape[1] - len(expected))
        assert accepted[b] == len(expected) - 1
        assert bonus[b] == (sequence[0][expected[-1]] if expected else -1)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 90), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32))
def test_random_blocks(rows, batch, vocabulary, seed):
    rng = random.Random(seed)
    sequences = [random_sequence(rows, vocabulary, rng) for _ in range(batch)]
    block = {name: [sequence[name] for sequence in sequences] for name in sequences[0]}
    if rng.random() < 0.2:
        block["mask_ordinal"][-1][0] = -1
    for backend in ("ref", "cpp", "triton"):
        assert_walks(block, backend)


def chain(rows: int) -> Block:
    return {
        "choice": [[100 + r + 1 for r in range(rows)]],
        "tokens": [[100 + r for r in range(rows)]],
        "parent": [[r - 1 for r in range(rows)]],
        "mask_ordinal": [[0] * rows],
    }


@pytest.mark.parametrize("rows", [1, 7, 64, 65, 130])
def test_a_chain_is_accepted_as_far_as_it_is_right(rows, backend):
    block = chain(rows)
    path, accepted, bonus = run(block, backend)
    assert path.tolist() == [list(range(rows))]
    assert (accepted.item(), bonus.item()) == (rows - 1, 100 + rows)
    if rows > 1:
        wrong = rows // 2
        block["tokens"][0][wrong] = 0
        path, accepted, bonus = run(block, backend)
        assert path.tolist() == [list(range(wrong)) + [-1] * (rows - wrong)]
        assert (accepted.item(), bonus.item()) == (wrong - 1, 100 + wrong)


def test_a_star_accepts_one_draft_or_none(backend):
    rows = 65
    block = {
        "choice": [[64, *range(200, 264)], [65, *range(200, 264)]],
        "tokens": [list(range(rows))] * 2,
        "parent": [[-1] + [0] * (rows - 1)] * 2,
        "mask_ordinal": [[0] * rows] * 2,
    }
    path, accepted, bonus = run(block, backend)
    assert path[:, :3].tolist() == [[0, 64, -1], [0, -1, -1]]
    assert accepted.tolist() == [1, 0] and bonus.tolist() == [263, 65]


def test_the_lowest_of_equal_siblings_is_taken(backend):
    block = {
        "choice": [[5, 1, 6, 9, 9]],
        "tokens": [[0, 4, 5, 5, 6]],
        "parent": [[-1, 0, 0, 0, 3]],
        "mask_ordinal": [[0] * 5],
    }
    path, accepted, bonus = run(block, backend)
    assert path.tolist() == [[0, 2, -1, -1, -1]]  # row 4 would extend row 3, which is not taken
    assert (accepted.item(), bonus.item()) == (1, 6)


@pytest.mark.parametrize("ordinal", [1, 2, -1])
def test_masks_and_padding_are_never_stepped_to(ordinal, backend):
    block = chain(4)
    block["mask_ordinal"][0][2] = ordinal
    path, accepted, bonus = run(block, backend)
    assert path.tolist() == [[0, 1, -1, -1]]
    assert (accepted.item(), bonus.item()) == (1, 102)
    unknown = {"choice": [[-1] * 3], "tokens": [[7, -1, -1]], "parent": [[-1, 0, PADDING]]}
    path, accepted, bonus = run({**unknown, "mask_ordinal": [[0, 1, -1]]}, backend)
    assert path.tolist() == [[0, -1, -1]]
    assert (accepted.item(), bonus.item()) == (0, -1)


def test_padded_sequence(backend):
    block = {name: rows * 2 for name, rows in chain(3).items()}
    block["mask_ordinal"] = [[-1, 0, 0], [0, 0, 0]]
    path, accepted, bonus = run(block, backend)
    assert path.tolist() == [[-1, -1, -1], [0, 1, 2]]
    assert accepted.tolist() == [-1, 2] and bonus.tolist() == [-1, 103]


def test_circular_parents_do_no_harm(backend):
    block = {
        "choice": [[1, 1, 1, 1]],
        "tokens": [[1, 1, 1, 1]],
        "parent": [[0, 3, 2, 0]],
        "mask_ordinal": [[0] * 4],
    }
    path, accepted, bonus = run(block, backend)
    assert path.tolist() == [[0, 3, -1, -1]]
    assert (accepted.item(), bonus.item()) == (1, 1)


@pytest.mark.parametrize(("batch", "rows"), [(0, 5), (3, 0), (0, 0)])
def test_empty(batch, rows, backend):
    path, accepted, bonus = esp_kernels.verify_tree(
        *[torch.empty(batch, rows, dtype=torch.int32)] * 4, backend=backend
    )
    assert path.shape == (batch, rows)
    assert accepted.tolist() == bonus.tolist() == [-1] * batch


def test_a_sequence_does_not_depend_on_its_neighbours(rng):
    sequences = [random_sequence(96, 2, rng) for _ in range(700)]
    tensors = [torch.tensor([s[name] for s in sequences], dtype=torch.int32) for name in sequences[0]]
    block = esp_kernels.verify_tree(*tensors)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert all(map(torch.equal, esp_kernels.verify_tree(*tensors), block))
    finally:
        torch.set_num_threads(threads)
    for b in range(0, 700, 71):
        alone = esp_kernels.verify_tree(*[t[b : b + 1] for t in tensors])
        assert all(torch.equal(a, whole[b : b + 1]) for a, whole in zip(alone, block, strict=True))


def test_reference_never_reads_values_on_the_host():
    block = [torch.empty(2, 70, dtype=torch.int32, device="meta")] * 4
    path, accepted, bonus = esp_kernels.verify_tree(*block, backend="ref")
    assert path.shape == (2, 70) and accepted.shape == bonus.shape == (2,)


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.on_host
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"choice": 3}, "choice must be a tensor, got int"),
        ({"choice": zeros(2, 3, dtype=torch.int64)}, "choice must be int32, got int64"),
        ({"choice": zeros(3)}, "choice must have shape [*, *], got [3]"),
        ({"tokens": zeros(2, 4)}, "tokens must have shape [2, 3], got [2, 4]"),
        ({"parent": zeros(3, 2).t()}, "parent must be contiguous, got strides [1, 2]"),
        ({"mask_ordinal": zeros(2, 3, dtype=torch.bool)}, "mask_ordinal must be int32, got bool"),
        (
            {"mask_ordinal": torch.tensor([[-1, 0, 0], [2, 0, 0]], dtype=torch.int32)},
            "mask_ordinal[1, 0] must be 0 (the root) or -1 (a padded sequence), got 2",
        ),
    ],
)
def test_bad_input(change, sentence, backend):
    names = ("choice", "tokens", "parent", "mask_ordinal")
    with pytest.raises(ValueError) as error:
        esp_kernels.verify_tree(**({name: zeros(2, 3) for name in names} | change), backend=backend)
    assert str(error.value) == sentence


def test_devices_must_agree():
    with pytest.raises(ValueError, match=r"^parent must be on cpu, got meta$"):
        esp_kernels.verify_tree(zeros(1, 3), zeros(1, 3), zeros(1, 3).to("meta"), zeros(1, 3), backend="ref")


def test_opcheck():
    arguments = tuple(torch.tensor(rows, dtype=torch.int32) for rows in chain(5).values())
    torch.library.opcheck(torch.ops.esp_kernels.verify_tree.default, arguments)
