import dataclasses
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import esp_kernels
from esp_kernels.testing import PADDING, assert_as_accurate, paged, poisoned, random_tree, strided

from . import oracle

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass
class Block:
    """Rows of trees behind prefixes, with dense caches that hold NaN wherever no row sees."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    prefix_len: list[int]
    parents: list[list[int]]
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def seen(self) -> torch.Tensor:
        return oracle.visible(self.parents, self.prefix_len, self.k.shape[1], self.window)

    def poisoned_caches(self) -> Pair:
        unseen = ~self.seen().any(1)[:, :, None, None]
        return self.k.masked_fill(unseen, torch.nan), self.v.masked_fill(unseen, torch.nan)

    def run(
        self, backend: str = "auto", caches: Pair | None = None, table: torch.Tensor | None = None
    ) -> Pair:
        ancestors, depth = oracle.metadata(self.parents)
        prefix_len = torch.tensor(self.prefix_len, dtype=torch.int32)
        k, v = caches or self.poisoned_caches()
        options = (table, self.scale, self.window, self.softcap, self.sinks)
        return esp_kernels.tree_attention(
            self.q, k, v, prefix_len, ancestors, depth, *options, backend=backend
        )

    def exact(self) -> Pair:
        return oracle.attention(self.q, self.k, self.v, self.seen(), self.scale, self.softcap, self.sinks)

    def baseline(self) -> Pair:
        """PyTorch's own result at q's precision; LSE, which it does not return, in float32."""
        seen = self.seen()
        real = seen.any(-1)[:, :, None]
        seen |= ~real  # PyTorch's bfloat16 products spread the NaN of an empty softmax
        group = self.q.shape[2] // self.k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

        def logits(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            s = q @ k.mT * (self.q.shape[-1] ** -0.5 if self.scale is None else self.scale)
            s = s if self.softcap is None else self.softcap * torch.tanh(s / self.softcap)
            s = s.masked_fill(~seen[:, None], -torch.inf)
            if self.sinks is None:
                return s
            sink = self.sinks.to(s.dtype)[None, :, None, None].expand(*s.shape[:3], 1)
            return torch.cat([s, sink], -1)

        if self.softcap is None and self.sinks is None:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen[:, None], scale=self.scale)
        else:
            out = logits(q, k).softmax(-1)[..., : seen.shape[-1]] @ v
        lse = logits(q.float(), k.float()).logsumexp(-1)
        out, lse = out.transpose(1, 2), lse.transpose(1, 2)
        return torch.where(real[..., None], out, 0), torch.where(real, lse, -torch.inf)


def block(
    prefix_len: Sequence[int],
    parents: Sequence[Sequence[int]],
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    **options: object,
) -> Block:
    rows = len(parents[0])
    cache = (len(parents), max(prefix_len) + rows, kv_heads, dim)
    return Block(
        torch.randn(len(parents), rows, heads, dim).to(dtype),
        torch.randn(cache).to(dtype),
        torch.randn(cache).to(dtype),
        list(prefix_len),
        [list(p) for p in parents],
        **options,
    )


def chain(rows: int) -> list[int]:
    return list(range(-1, rows - 1))


def check_accuracy(case: Block, result: Pair, factor: float = 8.0) -> None:
    """The factor is large for cases of few numbers, where PyTorch's own error may be small by luck."""
    for actual, exact, own in zip(result, case.exact(), case.baseline(), strict=True):
        assert_as_accurate(actual, exact, own, factor)


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


def assert_same(actual: Pair, expected: Pair) -> None:
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Block, int, bool]:
    rng = random.Random(draw(st.integers(0, 2**32)))
    torch.manual_seed(rng.randrange(2**32))
    rows = draw(st.sampled_from([1, 2, 7, 30, 65]))
    batch = draw(st.integers(1, 3))
    kv_heads, group = draw(st.sampled_from([(3, 1), (3, 3), (2, 4), (1, 8)]))
    parents = []
    for _ in range(batch):
        padding = rng.randrange(rows) if draw(st.booleans()) else 0
        parents.append(random_tree(rows, rng, padding, reach=draw(st.sampled_from([None, 1, 4]))))
    case = block(
        [draw(st.sampled_from([0, 1, 63, 64, 65, 300])) for _ in range(batch)],
        parents,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([64, 80, 96, 128, 256])),
        dtype=draw(st.sampled_from(DTYPES)),
        window=draw(st.sampled_from([None, None, 1, 3, 64, 100, 5000])),
        scale=draw(st.sampled_from([None, 0.2])),
        softcap=draw(st.sampled_from([None, None, 2.0, 30.0])),
        sinks=torch.randn(kv_heads * group) if draw(st.booleans()) else None,
    )
    return case, draw(st.sampled_from([0, 1, 16, 64])), draw(st.booleans())


@pytest.mark.parametrize("backend", ["ref", "cpp"])
@settings(deadline=None, max_examples=25)
@given(blocks())
def test_random_trees_match_float64(backend, drawn):
    case, page_size, gaps = drawn
    caches, table = case.poisoned_caches(), None
    if page_size:
        pages, table = paged(caches[0], page_size, random.Random(1))
        caches = pages, paged(caches[1], page_size, random.Random(1))[0]
    if gaps:
        case.q, caches = strided(case.q), (strided(caches[0]), strided(caches[1], 5))
    check_accuracy(case, case.run(backend, caches, table))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "group"), [(64, 3), (80, 1), (96, 8), (128, 4), (256, 2)])
def test_as_accurate_as_pytorch(dim, group, dtype, backend, rng):
    case = block([1000], [random_tree(30, rng)], heads=2 * group, dim=dim, dtype=dtype)
    check_accuracy(case, case.run(backend), factor=2.0)


@pytest.mark.parametrize("prefix", [0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize(
    "parent", [[-1], chain(9), [-1, *[0] * 8], chain(65)], ids=["root", "chain", "flat", "65"]
)
def test_degenerate_trees(parent, prefix, backend, rng):
    case = block([prefix], [parent])
    check_accuracy(case, case.run(backend))


@pytest.mark.parametrize("dim", range(16, 257, 48))
def test_every_multiple_of_16(dim, backend, rng):
    case = block([70], [random_tree(9, rng)], dim=dim)
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


# -------------------------------------------------------------------- a row does not depend on anything else


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
    for threads in different_threads():
        assert_same(case.run(), expected), threads


def different_threads() -> Iterator[int]:
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


# -------------------------------------------------------------------- what users have been hurt by


def test_window_goes_by_depth_not_by_row(backend, rng):
    flat = block([80], [[-1, *[0] * 20]], window=2)
    k, _ = flat.poisoned_caches()
    assert k[0, :79].isnan().all() and not k[0, 79:].isnan().any()
    check_accuracy(flat, flat.run(backend))
    flat.q[:] = flat.q[:, :1]
    flat.k[:, 81:], flat.v[:, 81:] = flat.k[:, 81:82], flat.v[:, 81:82]
    out, lse = flat.run(backend)
    assert all(torch.equal(out[:, r], out[:, 1]) and torch.equal(lse[:, r], lse[:, 1]) for r in range(1, 21))


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
def test_branches_across_pages(page_size, backend, rng):
    case = block([61, 5], [random_tree(30, rng, reach=5), random_tree(30, rng)])
    (k, table), (v, _) = (paged(x, page_size, random.Random(2)) for x in case.poisoned_caches())
    check_accuracy(case, case.run(backend, (k, v), table))


def test_padding_gives_zero_even_with_sinks(backend, rng):
    parents = [random_tree(12, rng, padding=5), [PADDING] * 12]
    case = block([20, 20], parents, sinks=torch.full((4,), 3.0))
    padding = torch.tensor(parents) == PADDING
    case.q[padding] = torch.nan
    out, lse = case.run(backend)
    assert (out[padding] == 0).all() and (lse[padding] == -torch.inf).all()
    case.q[padding] = 0
    check_accuracy(case, (out, lse))


def test_the_tree_is_read_and_not_assumed(backend, rng):
    case = block([10], [[-1, 0, 0, 1, 2]])
    other = dataclasses.replace(case, parents=[[-1, 0, 0, 2, 1]])
    first, second = case.run(backend), other.run(backend)
    assert torch.equal(first[0][:, :3], second[0][:, :3])
    assert (first[0][:, 3:] != second[0][:, 3:]).any(-1).all()
    assert_same(case.run(backend), first)


def test_a_bad_key_reaches_those_that_see_it_and_no_other(rng):
    parent = [-1, 0, 0, 1, 2]
    for bad, touched in ((3, range(5)), (10 + 1, (1, 3))):
        for cache in ("k", "v"):
            case = block([10], [parent])
            getattr(case, cache)[0, bad] = torch.nan
            out, lse = case.run("cpp")
            assert out.isnan().any(-1).all(-1)[0].tolist() == [r in touched for r in range(5)]
            assert lse.isnan().any(-1)[0].tolist() == [cache == "k" and r in touched for r in range(5)]


def test_a_window_ends_what_a_bad_key_touches(rng):
    case = block([200], [chain(5)], window=100)
    case.v[0, 103] = torch.nan
    out, _ = case.run("cpp")
    assert out.isnan().any(-1).any(-1)[0].tolist() == [True, True, True, False, False]


def test_large_scores_stay_finite(backend, rng):
    case = block([300], [random_tree(9, rng)], scale=300.0)
    check_accuracy(case, case.run(backend))


@pytest.mark.parametrize("prefix", [30, 500])
def test_parts_merge_by_lse(prefix, backend, rng):
    whole = block([prefix + 40 - 1], [[-1]])
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


# -------------------------------------------------------------------- arguments


@pytest.mark.parametrize(("batch", "rows"), [(0, 3), (2, 0)])
def test_empty(batch, rows, backend):
    out, lse = esp_kernels.tree_attention(
        torch.zeros(batch, rows, 4, 64),
        torch.zeros(batch, 9, 2, 64),
        torch.zeros(batch, 9, 2, 64),
        torch.zeros(batch, dtype=torch.int32),
        torch.zeros(batch, rows, (rows + 63) // 64, dtype=torch.int64),
        torch.zeros(batch, rows, dtype=torch.int32),
        backend=backend,
    )
    assert out.shape == (batch, rows, 4, 64) and lse.shape == (batch, rows, 4)


def arguments() -> dict[str, object]:
    ancestors, depth = oracle.metadata([[-1, 0, 0]])
    return {
        "q": torch.zeros(1, 3, 4, 64),
        "k_cache": torch.zeros(1, 8, 2, 64),
        "v_cache": torch.zeros(1, 8, 2, 64),
        "prefix_len": torch.tensor([5], dtype=torch.int32),
        "ancestors": ancestors,
        "depth": depth,
    }


def ints(*values: int) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.int32)


def words(*values: int) -> torch.Tensor:
    return torch.tensor([[[v] for v in values]])


PAGES = {"k_cache": torch.zeros(6, 4, 2, 64), "v_cache": torch.zeros(6, 4, 2, 64)}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"q": None}, "q must be a tensor, got NoneType"),
        ({"q": torch.zeros(1, 3, 4, 64).double()}, "q must be float32, bfloat16 or float16, got float64"),
        ({"q": torch.zeros(3, 4, 64)}, "q must have shape [*, *, *, *], got [3, 4, 64]"),
        (
            {"q": torch.zeros(1, 3, 64, 4).mT},
            "q must have stride 1 in its last dimension, got strides [768, 256, 1, 4]",
        ),
        (
            {"q": torch.zeros(1, 3, 4, 40)},
            "q must have a head dimension that is a multiple of 16 up to 256, got 40",
        ),
        (
            {"q": torch.zeros(1, 3, 4, 272)},
            "q must have a head dimension that is a multiple of 16 up to 256, got 272",
        ),
        ({"q": torch.zeros(1, 3, 5, 64)}, "q must have a multiple of k_cache's 2 heads, got 5"),
        ({"k_cache": torch.zeros(1, 8, 2, 64).half()}, "k_cache must be float32, got float16"),
        ({"k_cache": torch.zeros(2, 8, 2, 64)}, "k_cache must have shape [1, *, *, 64], got [2, 8, 2, 64]"),
        ({"v_cache": torch.zeros(1, 7, 2, 64)}, "v_cache must have shape [1, 8, 2, 64], got [1, 7, 2, 64]"),
        ({"prefix_len": ints(5)[0].long()}, "prefix_len must be int32, got int64"),
        ({"prefix_len": ints(5, 5)[0]}, "prefix_len must have shape [1], got [2]"),
        ({"prefix_len": ints(6)[0]}, "prefix_len[0] must lie in 0..5 (8 slots, 3 block rows), got 6"),
        ({"prefix_len": ints(-1)[0]}, "prefix_len[0] must lie in 0..5 (8 slots, 3 block rows), got -1"),
        ({"ancestors": ints(1, 3, 5)}, "ancestors must be int64, got int32"),
        ({"ancestors": words(1, 3)}, "ancestors must have shape [1, 3, 1], got [1, 2, 1]"),
        ({"ancestors": words(1, 7, 5)}, "ancestors[0, 1] names row 2, after 1"),
        ({"ancestors": words(1, 3, 5 | 1 << 40)}, "ancestors[0, 2] names row 40, after 2"),
        (
            {"ancestors": words(1, 3, -(1 << 63))},
            "ancestors[0, 2] names row 63, after 2",
        ),
        (
            {"ancestors": words(1, 3, 7)},
            "ancestors[0, 2] must name one row of each depth 0, 1, ... up to row 2, or none",
        ),
        (
            {"ancestors": words(1, 1, 5)},
            "ancestors[0, 1] must name one row of each depth 0, 1, ... up to row 1, or none",
        ),
        ({"depth": ints(0, 1)}, "depth must have shape [1, 3], got [1, 2]"),
        ({"depth": ints(0, 1, 3)}, "depth[0, 2] must lie in -1..2, got 3"),
        ({"depth": ints(0, 1, -2)}, "depth[0, 2] must lie in -1..2, got -2"),
        (
            {"depth": ints(0, 1, 2)},
            "ancestors[0, 2] must name one row of each depth 0, 1, ... up to row 2, or none",
        ),
        ({"block_table": ints(0, 1)[0]}, "block_table must have shape [1, *], got [2]"),
        (PAGES | {"block_table": ints(0, 6)}, "block_table[0, 1] must lie in 0..5, got 6"),
        (PAGES | {"block_table": ints(-1, 0)}, "block_table[0, 0] must lie in 0..5, got -1"),
        (PAGES | {"block_table": ints(5)}, "prefix_len[0] must lie in 0..1 (4 slots, 3 block rows), got 5"),
        ({"scale": 0.0}, "scale must be positive and finite, got 0"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"softcap": -2.5}, "softcap must be positive and finite, got -2.5"),
        ({"sinks": torch.zeros(3)}, "sinks must have shape [4], got [3]"),
        ({"sinks": torch.zeros(4).half()}, "sinks must be float32, got float16"),
    ],
)
def test_bad_input(change, sentence, backend):
    with pytest.raises(ValueError) as error:
        esp_kernels.tree_attention(**(arguments() | change), backend=backend)
    assert str(error.value) == sentence


def test_pages_that_are_not_in_use_may_be_anything(backend):
    table = ints(3, 1, -7, 99)
    out, _ = esp_kernels.tree_attention(**(arguments() | PAGES | {"block_table": table}), backend=backend)
    assert not out.isnan().any()


@pytest.mark.parametrize("optional", [False, True])
def test_opcheck(optional):
    options = (None, 0.1, 3, 5.0, torch.zeros(4)) if optional else ()
    values = tuple(arguments().values())
    torch.library.opcheck(torch.ops.esp_kernels.tree_attention.default, values + options)


def test_reference_in_float64_is_exact(rng):
    case = block([70], [random_tree(20, rng)], window=50, softcap=3.0, sinks=torch.randn(4))
    from esp_kernels.ref.tree_attention import tree_attention

    ancestors, depth = oracle.metadata(case.parents)
    wide = [x.double() for x in (case.q, case.k, case.v)]
    out, lse = tree_attention(
        *wide, torch.tensor([70], dtype=torch.int32), ancestors, depth, None, None, 50, 3.0, case.sinks
    )
    for actual, exact in zip((out, lse), case.exact(), strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-13)


def test_outputs_are_fresh_and_inputs_untouched(backend, rng):
    case = block([9], [random_tree(5, rng)])
    q, k, v = (x.clone() for x in (case.q, case.k, case.v))
    out, lse = case.run(backend, (case.k, case.v))
    assert out.is_contiguous() and lse.is_contiguous() and lse.dtype == torch.float32
    assert torch.equal(q, case.q) and torch.equal(k, case.k) and torch.equal(v, case.v)
    assert poisoned(out.shape, out.dtype).isnan().all() and not out.isnan().any()
