"""A row's bits depend on its own q and the keys that it sees, and on nothing else."""

import dataclasses
import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esp_kernels.testing import PADDING, paged, random_tree, strided

from . import oracle
from .blocks import DTYPES, Block, assert_same, block, blocks, chain, check_accuracy


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
    out, lse = case.run()
    for row in [r for r in range(40) if case.parents[0][r] != PADDING]:
        alone = rows_alone(case, 0, row).run()
        assert_same(alone, (out[:, row : row + 1], lse[:, row : row + 1]))


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("dim", [16, 80, 96, 128, 256])
def test_the_same_at_all_head_shapes(dim, kv_heads, rng):
    case = block([90], [random_tree(70, rng)], heads=8, kv_heads=kv_heads, dim=dim)
    out, lse = case.run()
    for row in (0, 1, 33, 69):
        assert_same(rows_alone(case, 0, row).run(), (out[:, row : row + 1], lse[:, row : row + 1]))


@settings(deadline=None, max_examples=25)
@given(blocks(), st.randoms(use_true_random=False))
def test_order_and_number_of_rows(drawn, rng):
    case, _, _ = drawn
    case.prefix_len, case.parents = case.prefix_len[:1], case.parents[:1]
    case.q, case.k, case.v = case.q[:1], case.k[:1], case.v[:1]
    out, lse = case.run()
    parent, order = case.parents[0], []
    keep = [r for r in range(len(parent)) if r == 0 or rng.random() < 0.8]
    while ready := [r for r in keep if r not in order and (parent[r] < 0 or parent[r] in order)]:
        order.append(rng.choice(ready))
    assert_same(reordered(case, order).run(), (out[:, order], lse[:, order]))


def test_batch_pages_strides_and_threads(rng):
    parents = [random_tree(33, rng), random_tree(33, rng, padding=20), [PADDING] * 33, chain(33)]
    case = block([2000, 3, 64, 1111], parents, heads=9, kv_heads=3, window=1500)
    expected = case.run()
    for b in range(4):
        single = dataclasses.replace(
            case,
            q=case.q[b : b + 1],
            k=case.k[b : b + 1],
            v=case.v[b : b + 1],
            prefix_len=case.prefix_len[b : b + 1],
            parents=parents[b : b + 1],
        )
        assert_same(single.run(), (expected[0][b : b + 1], expected[1][b : b + 1]))
    k, v = case.poisoned_caches()
    for page_size in (1, 7, 64, 500):
        (pages, table), (value_pages, _) = (paged(x, page_size, random.Random(5)) for x in (k, v))
        assert_same(case.run(caches=(pages, value_pages), table=table), expected)
    assert_same(case.run(caches=(strided(k), strided(v, 40))), expected)
    head_major = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    assert_same(case.run(caches=head_major), expected)
    for _ in thread_counts():
        assert_same(case.run(), expected)


def thread_counts() -> Iterator[int]:
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            yield threads
    finally:
        torch.set_num_threads(before)


def test_a_tree_of_several_tiles(backend, rng):
    case = block([100], [random_tree(150, rng, padding=9)], heads=8, kv_heads=1, dim=32)
    result = case.run(backend)
    check_accuracy(case, result)
    if backend == "cpp":
        for row in (149, 140, 70):
            if case.parents[0][row] != PADDING:
                alone = rows_alone(case, 0, row).run()
                assert_same(alone, tuple(x[:, row : row + 1] for x in result))
