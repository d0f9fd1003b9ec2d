import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import esp_kernels
from esp_kernels.testing import paged

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def int32(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def numbered(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits at all, NaN patterns included: what is moved is bits."""
    kind = INTEGERS[dtype.itemsize]
    limits = torch.iinfo(kind)
    return torch.randint(limits.min, limits.max, shape, dtype=kind).view(dtype)


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(INTEGERS[t.dtype.itemsize])


class Store:
    """One cache inside of a larger buffer: all of the buffer is compared, not only the cache."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, layout: str = "NHD"):
        outer, slots, heads, n = shape
        if layout == "NHD":
            self.base = numbered((outer + 2, slots, heads, n), dtype)
            self.cache = self.base[1:-1]
        elif layout == "HND":
            self.base = numbered((outer, heads + 2, slots, n), dtype)
            self.cache = self.base[:, 1:-1].transpose(1, 2)
        else:
            self.base = numbered((outer, slots, 2, heads, n + 3), dtype)
            self.cache = self.base[:, :, 1, :, :n]

    def moved(self, path, accepted, prefix_len, block_table) -> torch.Tensor:
        """The buffer as it must be afterwards; every row is read before any is written."""
        strides, offset = self.cache.stride(), self.cache.storage_offset()
        base = self.base.clone()
        target = base.as_strided(self.cache.shape, strides, offset)
        size = self.cache.shape[1]

        def place(b: int, slot: int) -> tuple[int, int]:
            return (b, slot) if block_table is None else (int(block_table[b, slot // size]), slot % size)

        for b, count in enumerate(accepted.tolist()):
            for i in range(1, count + 1):
                prefix = int(prefix_len[b])
                target[place(b, prefix + i)] = self.cache[place(b, prefix + int(path[b, i]))]
        return base


def assert_commits(stores, path, accepted, prefix_len, block_table=None, backend="auto") -> None:
    expected = [store.moved(path, accepted, prefix_len, block_table) for store in stores]
    arguments = (path, accepted, prefix_len, block_table)
    esp_kernels.commit_kv([store.cache for store in stores], *arguments, backend=backend)
    for store, base in zip(stores, expected, strict=True):
        assert torch.equal(bits(store.base), bits(base))


def padded(rows: list[list[int]], length: int) -> torch.Tensor:
    return int32(*[row + [-1] * (length - len(row)) for row in rows])


def table(batch: int, capacity: int, page_size: int, rng: random.Random) -> tuple[int, torch.Tensor]:
    """The number of pages and the block table of shuffled pages."""
    pages, block_table = paged(torch.zeros(batch, capacity, 1, 1), page_size, rng)
    return pages.shape[0], block_table


@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 4),
    rows=st.integers(1, 40),
    page_size=st.sampled_from([None, 1, 3, 16]),
    dtype=st.sampled_from(DTYPES),
)
@settings(deadline=None, max_examples=50)
def test_any_path_in_any_cache(backend, seed, batch, rows, page_size, dtype):
    torch.manual_seed(seed)
    rng = random.Random(seed)
    capacity = rows + rng.randrange(20)
    paths = [[0, *sorted(rng.sample(range(1, rows), rng.randrange(rows)))] for _ in range(batch)]
    accepted = [rng.choice([-1, 0, len(p) - 1, rng.randrange(len(p))]) for p in paths]
    # What is past `accepted` may be anything.
    path = padded(paths, rows + rng.randrange(2))
    prefix_len = [rng.choice([0, capacity - rows, rng.randrange(capacity - rows + 1)]) for _ in paths]
    if page_size:
        outer, block_table = table(batch, capacity, page_size, rng)
    else:
        outer, page_size, block_table = batch, capacity, None
    shapes = [
        (outer, page_size, rng.randrange(1, 4), rng.choice([1, 7, 64])) for _ in range(rng.randrange(1, 5))
    ]
    stores = [Store(shape, dtype, rng.choice(["NHD", "HND", "gaps"])) for shape in shapes]
    assert_commits(stores, path, int32(*accepted), int32(*prefix_len), block_table, backend)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("rows", [1, 7, 63, 65, 111])
@pytest.mark.parametrize("shift", [0, 1, 2, 5])
def test_chains_whose_sources_are_targets(shift, rows, page_size, backend, rng):
    """Every row but the root moves by `shift`, so that most sources are targets of later moves."""
    path = padded([[0, *range(1 + shift, rows + shift)]], rows + 1)
    capacity = rows + shift + 3
    outer, block_table = table(1, capacity, page_size, rng) if page_size else (1, None)
    store = Store((outer, page_size or capacity, 2, 8), torch.bfloat16)
    assert_commits([store], path, int32(rows - 1), int32(3), block_table, backend)


def test_a_path_to_the_last_slot(backend, rng):
    store = Store((2, 12, 1, 4), torch.float32)
    assert_commits([store], int32([0, 3, 7], [0, 1, 11]), int32(2, 2), int32(4, 0), None, backend)


@pytest.mark.parametrize("threads", [1, 2])
def test_all_layers_in_one_call(threads, backend, rng):
    batch, rows = 4, 60
    paths = [[0, *sorted(rng.sample(range(1, rows), 9))] for _ in range(batch)]
    outer, block_table = table(batch, 128, 16, rng)
    stores = [Store((outer, 16, 3, 64), torch.bfloat16) for _ in range(6 if backend == "triton" else 60)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        arguments = padded(paths, 12), int32(9, 9, -1, 4), int32(0, 67, 5, 68)
        assert_commits(stores, *arguments, block_table, backend)
    finally:
        torch.set_num_threads(before)


def test_padded_sequences_are_harmless(backend, rng):
    outer, block_table = table(3, 12, 4, rng)
    block_table[1:] = int32([-1, 2**31 - 1, -9])
    store = Store((outer, 4, 1, 4), torch.float32)
    path = int32([0, 2, 3, -1], [-1, -1, -1, -1], [2**31 - 1, -(2**31), 7, 3])
    prefix_len = int32(7, -(2**31), 2**31 - 1)
    assert_commits([store], path, int32(2, -1, 0), prefix_len, block_table, backend)


@pytest.mark.parametrize(("batch", "length"), [(0, 4), (2, 0), (0, 0), (2, 1)])
def test_empty(batch, length, backend, rng):
    store = Store((batch, 8, 1, 4), torch.float32)
    path = torch.zeros(batch, length, dtype=torch.int32)
    accepted = torch.full((batch,), min(length, 1) - 1, dtype=torch.int32)
    assert_commits([store], path, accepted, torch.zeros(batch, dtype=torch.int32), None, backend)


@pytest.mark.on_host
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"caches": []}, "caches must hold at least one tensor, got 0"),
        (
            {"caches": [torch.zeros(2, 12, 1, 8, dtype=torch.float64)]},
            "caches[0] must be float32, bfloat16, float16 or float8_e4m3fn, got float64",
        ),
        ({"caches": [torch.zeros(2, 12, 8)]}, "caches[0] must have shape [*, *, *, *], got [2, 12, 8]"),
        (
            {"caches": [torch.zeros(2, 12, 1, 8), torch.zeros(2, 13, 1, 8)]},
            "caches[1] must have shape [2, 12, *, *], got [2, 13, 1, 8]",
        ),
        (
            {"caches": [torch.zeros(2, 12, 1, 8), torch.zeros(2, 12, 1, 8).half()]},
            "caches[1] must be float32, got float16",
        ),
        (
            {"caches": [torch.zeros(2, 12, 8, 2).mT]},
            "caches[0] must have stride 1 in its last dimension, got strides [192, 16, 1, 2]",
        ),
        ({"path": torch.zeros(2, 4).long()}, "path must be int32, got int64"),
        ({"path": int32([0, 1, 2, 3])}, "path must have shape [2, *], got [1, 4]"),
        ({"accepted": int32(1)}, "accepted must have shape [2], got [1]"),
        ({"prefix_len": int32(1, 1, 1)}, "prefix_len must have shape [2], got [3]"),
        ({"block_table": int32([0, 1])}, "block_table must have shape [2, *], got [1, 2]"),
        ({"accepted": int32(2, 4)}, "accepted[1] must be in -1..3, got 4"),
        ({"accepted": int32(-2, 2)}, "accepted[0] must be in -1..3, got -2"),
        ({"path": int32([1, 2, 3, 4], [0, 1, 2, 3])}, "path[0, 0] must be 0, the root, got 1"),
        ({"path": int32([0, 1, 3, -1], [0, 4, 3, -1])}, "path[1, 2] must be above path[1, 1] = 4, got 3"),
        ({"path": int32([0, 0, 3, -1], [0, 4, 5, -1])}, "path[0, 1] must be above path[0, 0] = 0, got 0"),
        ({"path": int32([0, 2, -1, -1], [0, 4, 5, -1])}, "path[0, 2] must be above path[0, 1] = 2, got -1"),
        ({"prefix_len": int32(0, -1)}, "prefix_len[1] must be at least 0, got -1"),
        (
            {"path": int32([0, 2, 5, -1], [0, 1, 7, -1])},
            "prefix_len[1] + row 7 must be below the capacity of 12 slots, got 12",
        ),
        (
            {"path": int32([0, 2, 2**31 - 1, -1], [0, 1, 2, -1])},
            "prefix_len[0] + row 2147483647 must be below the capacity of 12 slots, got 2147483652",
        ),
        ({"block_table": int32([1], [2])}, "block_table[1, 0] must be in 0..1, got 2"),
        ({"block_table": int32([1], [-1])}, "block_table[1, 0] must be in 0..1, got -1"),
        ({"path": [0, 1]}, "path must be a tensor, got list"),
    ],
)
def test_bad_input(change, sentence, backend):
    arguments = {
        "caches": [torch.zeros(2, 12, 1, 8), torch.zeros(2, 12, 2, 4)],
        "path": int32([0, 2, 5, -1], [0, 1, 3, -1]),
        "accepted": int32(2, 2),
        "prefix_len": int32(5, 5),
    } | change
    with pytest.raises(ValueError) as error:
        esp_kernels.commit_kv(**arguments, backend=backend)
    assert str(error.value) == sentence


def test_opcheck(rng):
    caches = [torch.randn(2, 12, 1, 8), torch.randn(2, 12, 2, 4)]
    path, two, table = int32([0, 2, 5, -1], [0, 1, 3, -1]), int32(2, 2), int32([1], [0])
    for block_table in (None, table):
        torch.library.opcheck(torch.ops.esp_kernels.commit_kv.default, (caches, path, two, two, block_table))
