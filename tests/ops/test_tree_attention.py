import dataclasses
import random
import subprocess
import sys

import pytest
import torch
from hypothesis import assume, given, settings

from esp_kernels.ref.tree_attention import tree_attention as reference
from esp_kernels.testing import PADDING, assert_as_accurate, paged, random_tree, strided

from . import oracle
from .blocks import (
    DTYPES,
    KERNELS,
    assert_same,
    block,
    blocks,
    chain,
    check_accuracy,
    dtype_of,
    gap_of,
)


@pytest.mark.parametrize("backend", ["ref", "cpp"])
@settings(deadline=None, max_examples=25)
@given(blocks())
def test_random_trees_match_float64(backend, drawn):
    check_random_tree(backend, drawn)


@pytest.mark.parametrize("backend", KERNELS)
@settings(deadline=None, max_examples=8)
@given(blocks(small=True))
def test_small_random_trees_match_float64(backend, drawn):
    assume(backend != "cuda" or drawn[0].q.dtype != torch.float32)
    check_random_tree(backend, drawn)


def check_random_tree(backend, drawn):
    case, page_size, gaps = drawn
    caches, table = case.poisoned_caches(), None
    if page_size:
        pages, table = paged(caches[0], page_size, random.Random(1))
        caches = pages, paged(caches[1], page_size, random.Random(1))[0]
    if gaps:
        gap = gap_of(backend)
        case.q, caches = strided(case.q, gap), (strided(caches[0], gap), strided(caches[1], 3 * gap))
    check_accuracy(case, case.run(backend, caches, table))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "group"), [(64, 3), (80, 1), (96, 8), (128, 4), (256, 2)])
def test_as_accurate_as_pytorch(dim, group, dtype, backend, rng):
    prefix, rows, kv_heads = (600, 7, 1) if backend in KERNELS else (1000, 30, 2)
    tree = random_tree(rows, rng)
    case = block([prefix], [tree], kv_heads * group, kv_heads, dim, dtype)
    check_accuracy(case, case.run(backend), factor=2.0)


@pytest.mark.parametrize("prefix", [0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize(
    "parent", [[-1], chain(9), [-1, *[0] * 8], chain(65)], ids=["root", "chain", "flat", "65"]
)
def test_degenerate_trees(parent, prefix, backend, rng):
    case = block([prefix], [parent], heads=2, kv_heads=1, dtype=dtype_of(backend))
    check_accuracy(case, case.run(backend))


@pytest.mark.parametrize(
    "options",
    [{"window": 270}, {"softcap": 2.0}, {"sinks": torch.arange(4.0)}, {"scale": 0.3}],
    ids=["window", "softcap", "sinks", "scale"],
)
def test_each_option_matches_float64(options, backend, rng):
    case = block([600], [random_tree(7, rng)], dtype=dtype_of(backend), **options)
    check_accuracy(case, case.run(backend))


@pytest.mark.parametrize("backend", ["ref", "triton"])
@pytest.mark.parametrize("scales", [None, ([0.3, 2.0], [0.7, 1.5])], ids=["plain", "scaled"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_float8_caches(dtype, scales, backend, rng):
    case = block([300], [random_tree(5, rng)], dim=48, dtype=dtype, window=290)
    case.k, case.v = case.k.to(torch.float8_e4m3fn), case.v.to(torch.float8_e4m3fn)
    caches, table = case.poisoned_caches(), None
    if scales:
        case.k_scale, case.v_scale = torch.tensor(scales).unbind()
        (k, table), (v, _) = (paged(x, 16, random.Random(2)) for x in caches)
        caches = k, v
    check_accuracy(case, case.run(backend, caches, table))


@pytest.mark.parametrize("dim", range(16, 257, 48))
def test_every_multiple_of_16(dim, backend, rng):
    case = block([70], [random_tree(9, rng)], dim=dim, dtype=dtype_of(backend))
    check_accuracy(case, case.run(backend))


@pytest.mark.parametrize("rows", [200, 1024])
def test_a_long_chain_is_causal_attention(rows, rng):
    case = block([37], [chain(rows)], heads=3, kv_heads=1)
    q, k, v = (x.transpose(1, 2).double() for x in (case.q, case.k, case.v))
    mask = torch.ones(rows, 37 + rows, dtype=torch.bool).tril(37)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    exact, own = (
        sdpa(q, k, v, mask, enable_gqa=True),
        sdpa(q.float(), k.float(), v.float(), mask, enable_gqa=True),
    )
    assert_as_accurate(case.run()[0], exact.transpose(1, 2), own.transpose(1, 2))


def test_reference_in_float64_is_exact(rng):
    case = block([70], [random_tree(20, rng)], window=50, softcap=3.0, sinks=torch.randn(4))
    ancestors, depth = oracle.metadata(case.parents)
    wide = [x.double() for x in (case.q, case.k, case.v)]
    out, lse = reference(
        *wide, torch.tensor([70], dtype=torch.int32), ancestors, depth, None, None, 50, 3.0, case.sinks
    )
    for actual, exact in zip((out, lse), case.exact(), strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-13)


# -------------------------------------------------------------------- what users have been hurt by


def test_window_goes_by_depth_not_by_row(backend, rng):
    flat = block([80], [[-1, *[0] * 20]], window=2, dtype=dtype_of(backend))
    k, _ = flat.poisoned_caches()
    assert k[0, :79].isnan().all() and not k[0, 79:].isnan().any()
    check_accuracy(flat, flat.run(backend))
    flat.q[:] = flat.q[:, :1]
    flat.k[:, 81:], flat.v[:, 81:] = flat.k[:, 81:82], flat.v[:, 81:82]
    out, lse = flat.run(backend)
    assert all(torch.equal(out[:, r], out[:, 1]) and torch.equal(lse[:, r], lse[:, 1]) for r in range(1, 21))


def test_rows_of_other_branches_take_no_room_in_a_window(backend, rng):
    case = block([80], [[-1, *[0] * 9, 9, 10, 11]], window=2, dtype=dtype_of(backend))
    check_accuracy(case, case.run(backend))


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
def test_branches_across_pages(page_size, backend, rng):
    rows = 9 if backend in KERNELS else 30
    parents = [random_tree(rows, rng, reach=5), random_tree(rows, rng)]
    case = block([61, 5], parents, dtype=dtype_of(backend))
    (k, table), (v, _) = (paged(x, page_size, random.Random(2)) for x in case.poisoned_caches())
    check_accuracy(case, case.run(backend, (k, v), table))


def test_padding_gives_zero_even_with_sinks(backend, rng):
    parents = [random_tree(12, rng, padding=5), [PADDING] * 12]
    case = block([20, 20], parents, sinks=torch.full((4,), 3.0), dtype=dtype_of(backend))
    padding = torch.tensor(parents) == PADDING
    case.q[padding] = torch.nan
    out, lse = case.run(backend)
    assert (out[padding] == 0).all() and (lse[padding] == -torch.inf).all()
    case.q[padding] = 0
    check_accuracy(case, (out, lse))


def test_the_tree_is_read_and_not_assumed(backend, rng):
    case = block([10], [[-1, 0, 0, 1, 2]], dtype=dtype_of(backend))
    other = dataclasses.replace(case, parents=[[-1, 0, 0, 2, 1]])
    first, second = case.run(backend), other.run(backend)
    assert torch.equal(first[0][:, :3], second[0][:, :3])
    assert (first[0][:, 3:] != second[0][:, 3:]).any(-1).all()
    assert_same(case.run(backend), first)


@pytest.mark.parametrize("backend", ["cpp", *KERNELS])
def test_a_bad_key_reaches_those_that_see_it_and_no_other(backend, rng):
    parent = [-1, 0, 0, 1, 2]
    for bad, touched in ((3, range(5)), (10 + 1, (1, 3))):
        for cache in ("k", "v"):
            case = block([10], [parent], dtype=dtype_of(backend))
            getattr(case, cache)[0, bad] = torch.nan
            out, lse = case.run(backend)
            assert out.isnan().any(-1).all(-1)[0].tolist() == [r in touched for r in range(5)]
            assert lse.isnan().any(-1)[0].tolist() == [cache == "k" and r in touched for r in range(5)]


def test_a_window_ends_what_a_bad_key_touches(rng):
    case = block([200], [chain(5)], window=100)
    case.v[0, 103] = torch.nan
    out, _ = case.run("cpp")
    assert out.isnan().any(-1).any(-1)[0].tolist() == [True, True, True, False, False]


@pytest.mark.parametrize(("window", "dim"), [(None, 16), (4500, 16), (None, 256)])
def test_a_prefix_of_more_chunks_than_splits(window, dim, backend, rng):
    case = block([4900], [[-1, 0, 1]], heads=2, kv_heads=1, dim=dim, window=window, dtype=dtype_of(backend))
    check_accuracy(case, case.run(backend))


def test_large_scores_stay_finite(backend, rng):
    case = block([300], [random_tree(9, rng)], scale=300.0, dtype=dtype_of(backend))
    check_accuracy(case, case.run(backend))


@pytest.mark.parametrize("prefix", [30, 500])
def test_parts_merge_by_lse(prefix, backend, rng):
    whole = block([prefix + 40 - 1], [[-1]], dtype=dtype_of(backend))
    part = [
        dataclasses.replace(whole, k=whole.k[:, s], v=whole.v[:, s], prefix_len=[n - 1]).run(backend)
        for s, n in ((slice(prefix), prefix), (slice(prefix, None), 40))
    ]
    lse = torch.logaddexp(part[0][1], part[1][1])
    merged = sum(out * (own - lse).exp()[..., None] for out, own in part)
    check_accuracy(whole, (merged, lse))


MEMORY = """
import torch, esp_kernels
torch.set_num_threads(2)

rows, heads, kv_heads, dim = 60, 9, 3, 64
q = torch.randn(1, rows, heads, dim)
k, v = torch.randn(2, 1, {prefix} + rows, kv_heads, dim)
ancestors = torch.tensor([[[(2 << r) - 1] for r in range(rows)]])
depth = torch.arange(rows, dtype=torch.int32)[None]

def run(prefix):
    return esp_kernels.tree_attention(q, k, v, torch.tensor([prefix], dtype=torch.int32), ancestors, depth)

def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

run(100)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = kilobytes("VmRSS")
run({prefix})
print(kilobytes("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_prefix():
    peaks = {}
    for prefix in (8192, 32768):
        script = MEMORY.format(prefix=prefix)
        peaks[prefix] = (
            int(subprocess.run([sys.executable, "-c", script], stdout=-1, check=True).stdout) * 1024
        )
    one_row_of_scores_each = 60 * 32768 * 4
    assert peaks[32768] < 40 * (60 * 9 * 64 * 4) < one_row_of_scores_each
    assert abs(peaks[32768] - peaks[8192]) < 1 << 20
