import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import esp_kernels
from esp_kernels import PADDING
from esp_kernels.ref.tree_metadata import tree_metadata as unchecked
from esp_kernels.testing import random_tree


def walk(parent: list[int]) -> tuple[list[int], list[set[int]]]:
    """Depths and visible rows, by walking every row's parents."""
    depth, visible = [], []
    for row in range(len(parent)):
        seen, r = [], row
        while parent[row] != PADDING and r >= 0:
            seen.append(r)
            r = parent[r]
        depth.append(len(seen) - 1)
        visible.append(set(seen))
    return depth, visible


def bits(words: torch.Tensor) -> set[int]:
    return {64 * w + j for w, word in enumerate(words.tolist()) for j in range(64) if word >> j & 1}


def assert_is_walk(parent: list[list[int]], backend: str) -> None:
    rows = len(parent[0])
    depth, ancestors = esp_kernels.tree_metadata(torch.tensor(parent, dtype=torch.int32), backend=backend)
    assert depth.dtype == torch.int32 and ancestors.dtype == torch.int64
    assert depth.is_contiguous() and ancestors.is_contiguous()
    assert ancestors.shape == (len(parent), rows, -(-rows // 64))
    for b, sequence in enumerate(parent):
        expected_depth, expected_visible = walk(sequence)
        assert depth[b].tolist() == expected_depth
        assert [bits(words) for words in ancestors[b]] == expected_visible


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 140), st.integers(1, 3), st.sampled_from([1, 2, 7, 200]), st.integers(0, 2**32))
def test_random_trees(rows, batch, reach, seed):
    rng = random.Random(seed)
    parent = [random_tree(rows, rng, rng.randrange(rows), reach) for _ in range(batch)]
    for backend in ("ref", "cpp", "triton") if seed % 3 == 0 else ("ref", "cpp"):
        assert_is_walk(parent, backend)


@pytest.mark.parametrize("rows", [1, 2, 7, 63, 64, 65, 111, 128, 130])
def test_chains_and_stars(rows, backend):
    chain = [r - 1 for r in range(rows)]
    star = [-1] + [0] * (rows - 1)
    assert_is_walk([chain, star], backend)


def test_ragged_batch_with_a_padded_sequence(backend, rng):
    rows = 70
    parent = [random_tree(n, rng) + [PADDING] * (rows - n) for n in (70, 1, 65)] + [[PADDING] * rows]
    assert_is_walk(parent, backend)
    depth, ancestors = esp_kernels.tree_metadata(torch.tensor(parent, dtype=torch.int32), backend=backend)
    assert (depth[3] == -1).all() and not ancestors[3].any()


@pytest.mark.parametrize(("batch", "rows"), [(0, 5), (3, 0), (0, 0)])
def test_empty(batch, rows, backend):
    depth, ancestors = esp_kernels.tree_metadata(torch.empty(batch, rows, dtype=torch.int32), backend=backend)
    assert depth.shape == (batch, rows) and ancestors.shape == (batch, rows, -(-rows // 64))


def test_a_row_does_not_depend_on_its_neighbours(rng):
    parent = torch.tensor([random_tree(96, rng, 5) for _ in range(400)], dtype=torch.int32)
    depth, ancestors = esp_kernels.tree_metadata(parent)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            again = esp_kernels.tree_metadata(parent)
            assert torch.equal(again[0], depth) and torch.equal(again[1], ancestors)
    finally:
        torch.set_num_threads(threads)
    for b in range(0, 400, 37):
        alone = esp_kernels.tree_metadata(parent[b : b + 1, :64].contiguous())
        assert torch.equal(alone[0][0], depth[b, :64])
        assert torch.equal(alone[1][0, :, 0], ancestors[b, :64, 0])


@pytest.mark.parametrize("value", [PADDING - 1, -1, 3, 4, 5, 2**31 - 1, -(2**31)])
def test_unchecked_values_become_padding(value):
    """Where values cannot be checked without a sync they must do no harm."""
    parent = torch.tensor([[-1, 0, 1, value, 3, 2]], dtype=torch.int32)
    depth, ancestors = unchecked(parent)
    assert depth.tolist() == [[0, 1, 2, -1, -1, 3]]
    assert ancestors.flatten().tolist() == [0b1, 0b11, 0b111, 0, 0, 0b100111]
    no_root = torch.tensor([[value if value != -1 else 0, 0, 1]], dtype=torch.int32)
    assert unchecked(no_root)[0].tolist() == [[-1, -1, -1]]


def test_reference_never_reads_values_on_the_host():
    depth, ancestors = esp_kernels.tree_metadata(
        torch.empty(2, 70, dtype=torch.int32, device="meta"), backend="ref"
    )
    assert depth.shape == (2, 70) and ancestors.shape == (2, 70, 2)


def index(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


EARLIER = "must be -2 (padding) or an earlier row that is not padding, got"


@pytest.mark.on_host
@pytest.mark.parametrize(
    ("parent", "sentence"),
    [
        ("text", "parent must be a tensor, got str"),
        (torch.zeros(2, 3), "parent must be int32, got float32"),
        (torch.zeros(3, dtype=torch.int32), "parent must have shape [*, *], got [3]"),
        (
            torch.zeros(3, 2, dtype=torch.int32).t(),
            "parent must be contiguous, got strides [1, 2]",
        ),
        (index([0, 0]), "parent[0, 0] must be -1 (the root) or -2 (a padded sequence), got 0"),
        (index([-1, 0], [-3, 0]), "parent[1, 0] must be -1 (the root) or -2 (a padded sequence), got -3"),
        (index([-1, 0, -1]), f"parent[0, 2] {EARLIER} -1"),
        (index([-1, 0, 2]), f"parent[0, 2] {EARLIER} 2"),
        (index([-1, 0, 0], [-1, 7, 9]), f"parent[1, 1] {EARLIER} 7"),
        (index([-1, -2, 1]), f"parent[0, 2] {EARLIER} 1"),
        (index([-2, 0, -2]), f"parent[0, 1] {EARLIER} 0"),
        (index([-1, -(2**31)]), f"parent[0, 1] {EARLIER} -2147483648"),
    ],
)
def test_bad_input(parent, sentence, backend):
    with pytest.raises(ValueError) as error:
        esp_kernels.tree_metadata(parent, backend=backend)
    assert str(error.value) == sentence


def test_opcheck():
    torch.library.opcheck(torch.ops.esp_kernels.tree_metadata.default, (index([-1, 0, 0, -2], [-2] * 4),))
