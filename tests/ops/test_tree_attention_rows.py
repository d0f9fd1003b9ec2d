"""A row's bits depend on its own q and the keys that it sees, and on nothing else."""

import dataclasses
import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from esp_kernels.testing import PADDING, paged, random_tree, strided

from . import oracle
from .blocks import (
    DTYPES,
    KERNELS,
    Block,
    assert_same,
    block,
    blocks,
    chain,
    check_accuracy,
    dtype_of,
    gap_of,
)


def rows_alone(case: Block, b: int, row: int) -> Block:
    """The row decoded by itself, after its ancestors were moved into the prefix by depth."""
    prefix, line = case.prefix_len[b], oracle.path(case.parents[b], row)
    slots = [*range(prefix), *(prefix + j for j in line)]
    return dataclasses.replace(
        case,
        q=case.q[b : b + 1, row : row + 1],
        k=case.k[b : b + 1, slots],
        v=case.v[b : b + 1, slots],
        prefix_len=[len(slots) - 1],
        parents=[[-1]],
    )


def reordered(case: Block, order: Sequence[int]) -> Block:
    """Sequence 0 of the case with block row i taken from row order[i]."""
    place = {old: new for new, old in enumerate(order)}
    parent = [case.parents[0][old] for old in order]
    prefix = case.prefix_len[0]
    slots = [*range(prefix), *(prefix + old for old in order)]
    return dataclasses.replace(
        case,
        q=case.q[:1, list(order)],
        k=case.k[:1, slots],
        v=case.v[:1, slots],
        prefix_len=[prefix],
        parents=[[place[p] if p >= 0 else p for p in parent]],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options", [{}, {"window": 3}, {"window": 70}, {"softcap": 5.0}, {"sinks": torch.ones(6)}]
)
@pytest.mark.parametrize("prefix", [0, 1, 57, 63, 64, 250, 256, 700])
def test_verified_in_a_tree_is_decoded_after_its_ancestors(prefix, options, dtype, rng):
    case = block([prefix], [random_tree(40, rng, padding=3, reach=4)], heads=6, dtype=dtype, **options)
    check_alone(case, "cpp", [r for r in range(40) if case.parents[0][r] != PADDING])


def check_alone(case: Block, backend: str, rows: Sequence[int]) -> None:
    out, lse = case.run(backend)
    for row in rows:
        alone = rows_alone(case, 0, row).run(backend)
        assert_same(alone, (out[:, row : row + 1], lse[:, row : row + 1]))


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(
    ("prefix", "dtype", "options"),
    [
        (0, torch.float32, {}),
        (1, torch.bfloat16, {"sinks": torch.ones(3)}),
        (15, torch.float16, {"window": 3}),
        (31, torch.float32, {"softcap": 5.0}),
        (32, torch.bfloat16, {}),
        (63, torch.float32, {"window": 33}),
        (256, torch.bfloat16, {"window": 256}),
        (270, torch.float16, {}),
        (271, torch.bfloat16, {"window": 70}),
        (700, torch.bfloat16, {"window": 400, "softcap": 5.0, "sinks": torch.ones(3)}),
        (4110, torch.bfloat16, {"window": 4096}),
    ],
)
def test_a_kernel_verifies_in_a_tree_what_it_decodes_after_its_ancestors(
    prefix, dtype, options, backend, rng
):
    parent = [-1, 0, 1, 0, 3, PADDING, 4, 2, 6, 8]
    case = block([prefix], [parent], heads=3, kv_heads=1, dim=32, dtype=dtype, **options)
    check_alone(case, backend, (0, 2, 7, 9))


@pytest.mark.parametrize("backend", KERNELS)
def test_a_kernel_keeps_the_bits_of_every_row_down_to_its_depth(backend, rng):
    from esp_kernels.triton.tree_attention import DEEPEST

    case = block([300], [chain(20)], heads=2, kv_heads=1, dim=16, dtype=torch.bfloat16)
    check_alone(case, backend, (1, DEEPEST.value - 1, DEEPEST.value))


@pytest.mark.parametrize("backend", KERNELS)
def test_a_kernel_reads_a_tree_deeper_than_the_bits_hold(backend, rng):
    """Rows of other branches lie among the deep row's ancestors, so no slot is at its position."""
    parent = [-1, 0, *(row - 1 if row % 2 else row - 2 for row in range(2, 48))]
    case = block([40], [parent], heads=2, kv_heads=1, dim=16, dtype=torch.bfloat16)
    check_accuracy(case, case.run(backend), factor=2.0)


def test_a_kernel_keeps_the_bits_over_float8_caches(rng):
    case = block([290], [random_tree(6, rng)], heads=2, kv_heads=1, dim=16, dtype=torch.bfloat16)
    case.k, case.v = case.k.to(torch.float8_e4m3fn), case.v.to(torch.float8_e4m3fn)
    case.k_scale, case.v_scale = torch.tensor([0.3]), torch.tensor([1.7])
    check_alone(case, "triton", (0, 3, 5))


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("dim", [16, 80, 96, 128, 256])
def test_the_same_at_all_head_shapes(dim, kv_heads, rng):
    case = block([90], [random_tree(70, rng)], heads=8, kv_heads=kv_heads, dim=dim)
    check_alone(case, "cpp", (0, 1, 33, 69))


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "heads"), [(16, 4), (80, 8), (128, 20), (256, 8)])
def test_a_kernel_does_the_same_at_all_head_shapes(dim, heads, dtype, backend, rng):
    """9 rows of 8 or 20 heads fill other tiles than one row does."""
    case = block([90], [random_tree(9, rng)], heads=heads, kv_heads=1, dim=dim, dtype=dtype)
    check_alone(case, backend, (0, 8))


@settings(deadline=None, max_examples=25)
@given(blocks(), st.randoms(use_true_random=False))
def test_order_and_number_of_rows(drawn, rng):
    check_order("cpp", drawn[0], rng)


@pytest.mark.parametrize("backend", KERNELS)
@settings(deadline=None, max_examples=6)
@given(blocks(small=True), st.randoms(use_true_random=False))
def test_order_and_number_of_rows_of_a_kernel(backend, drawn, rng):
    assume(backend != "cuda" or drawn[0].q.dtype != torch.float32)
    check_order(backend, drawn[0], rng)


def check_order(backend: str, case: Block, rng: random.Random) -> None:
    case.prefix_len, case.parents = case.prefix_len[:1], case.parents[:1]
    case.q, case.k, case.v = case.q[:1], case.k[:1], case.v[:1]
    out, lse = case.run(backend)
    parent, order = case.parents[0], []
    keep = [r for r in range(len(parent)) if r == 0 or rng.random() < 0.8]
    while ready := [r for r in keep if r not in order and (parent[r] < 0 or parent[r] in order)]:
        order.append(rng.choice(ready))
    assert_same(reordered(case, order).run(backend), (out[:, order], lse[:, order]))


def test_batch_pages_strides_and_threads(rng):
    parents = [random_tree(33, rng), random_tree(33, rng, padding=20), [PADDING] * 33, chain(33)]
    case = block([2000, 3, 64, 1111], parents, heads=9, kv_heads=3, window=1500)
    check_layouts("cpp", case)
    expected = case.run()
    for _ in thread_counts():
        assert_same(case.run(), expected)


@pytest.mark.parametrize("backend", KERNELS)
def test_batch_pages_and_strides_of_a_kernel(backend, rng):
    parents = [random_tree(5, rng), [PADDING] * 5, chain(5)]
    options = {"dim": 32, "dtype": dtype_of(backend), "window": 500}
    check_layouts(backend, block([530, 64, 3], parents, heads=2, kv_heads=1, **options))


def check_layouts(backend: str, case: Block) -> None:
    expected = case.run(backend)
    for b, parent in enumerate(case.parents):
        single = dataclasses.replace(
            case,
            q=case.q[b : b + 1],
            k=case.k[b : b + 1],
            v=case.v[b : b + 1],
            prefix_len=case.prefix_len[b : b + 1],
            parents=[parent],
        )
        assert_same(single.run(backend), (expected[0][b : b + 1], expected[1][b : b + 1]))
    k, v = case.poisoned_caches()
    for page_size in (1, 7, 64, 500):
        (pages, table), (value_pages, _) = (paged(x, page_size, random.Random(5)) for x in (k, v))
        assert_same(case.run(backend, (pages, value_pages), table), expected)
    assert_same(case.run(backend, (strided(k, gap_of(backend)), strided(v, 40))), expected)
    head_major = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    assert_same(case.run(backend, head_major), expected)


def thread_counts() -> Iterator[int]:
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            yield threads
    finally:
        torch.set_num_threads(before)


def test_a_tree_of_several_tiles(backend, rng):
    rows = 40 if backend in KERNELS else 150
    parents = [random_tree(rows, rng, padding=9)]
    case = block([100], parents, heads=8, kv_heads=1, dim=32, dtype=dtype_of(backend))
    result = case.run(backend)
    check_accuracy(case, result)
    if backend == "cpp":
        for row in (149, 140, 70):
            if case.parents[0][row] != PADDING:
                alone = rows_alone(case, 0, row).run()
                assert_same(alone, tuple(x[:, row : row + 1] for x in result))
