import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import esp_kernels
from esp_kernels import _backend
from esp_kernels.testing import PADDING, assert_as_accurate, paged, poisoned, random_tree, strided, unpaged

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
POSITIONS = 256


def tables(rotary: int, positions: int = POSITIONS) -> tuple[torch.Tensor, torch.Tensor]:
    frequency = 10000.0 ** -(torch.arange(0, rotary, 2).double() / max(rotary, 1))
    angle = torch.arange(positions).double()[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def int32(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rows [R, H, D] in float64, as complex numbers."""
    half = cos.shape[1]
    x = x.double()
    number = torch.complex(x[..., :half], x[..., half : 2 * half])
    number = number * torch.complex(cos.double(), sin.double())[:, None]
    return torch.cat([number.real, number.imag, x[..., 2 * half :]], dim=-1)


def depths(trees: list[list[int]]) -> torch.Tensor:
    def depth(tree: list[int], r: int) -> int:
        return -1 if tree[r] == PADDING else 0 if tree[r] == -1 else 1 + depth(tree, tree[r])

    return int32(*[[depth(tree, r) for r in range(len(tree))] for tree in trees])


class Block:
    """A random block: q, k and v are views of one projection, the caches are poisoned."""

    def __init__(self, rng, batch, rows, q_heads, kv_heads, n, rotary, dtype, slots=None, padding=0):
        slots = slots or 40 + rows
        fused = torch.randn(batch, rows, (q_heads + 2 * kv_heads) * n).to(dtype)
        heads = fused.unflatten(-1, (q_heads + 2 * kv_heads, n))
        self.q, self.k, self.v = heads.split([q_heads, kv_heads, kv_heads], dim=2)
        self.cos, self.sin = tables(rotary)
        self.prefix_len = int32(*[rng.randrange(slots - rows + 1) for _ in range(batch)])
        self.depth = depths([random_tree(rows, rng, padding) for _ in range(batch)])
        self.k_cache, self.v_cache = (poisoned((batch, slots, kv_heads, n), dtype) for _ in range(2))
        self.block_table: torch.Tensor | None = None
        self.k_scale: torch.Tensor | None = None
        self.v_scale: torch.Tensor | None = None

    def paged(self, page_size: int, rng: random.Random) -> "Block":
        self.k_cache, self.block_table = paged(self.k_cache, page_size, rng)
        self.v_cache = poisoned(self.k_cache.shape, self.k_cache.dtype)
        return self

    def in_float8(self, scaled: bool) -> "Block":
        self.k_cache, self.v_cache = (c.to(torch.float8_e4m3fn) for c in (self.k_cache, self.v_cache))
        if scaled:
            self.k_scale, self.v_scale = torch.rand(2, self.k.shape[2]) + 0.1
        return self

    def run(self, backend: str = "auto") -> torch.Tensor:
        return esp_kernels.rope_append(*vars(self).values(), backend=backend)

    def dense(self, cache: torch.Tensor) -> torch.Tensor:
        if self.block_table is None:
            return cache
        return unpaged(cache, self.block_table, self.block_table.shape[1] * cache.shape[1])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, NaN included."""
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def assert_correct(block: Block, backend: str) -> None:
    rotated = block.run(backend)
    dtype = block.q.dtype
    assert rotated.dtype == dtype and rotated.is_contiguous()
    rows = [
        (b, r) for b in range(len(block.depth)) for r in range(block.depth.shape[1]) if block.depth[b, r] >= 0
    ]
    b, r = torch.tensor(rows).unbind(1)
    slot, position = block.prefix_len[b] + r, block.prefix_len[b] + block.depth[b, r]
    angles = block.cos[position], block.sin[position]
    exact_q, exact_k = turned(block.q[b, r], *angles), turned(block.k[b, r], *angles)
    assert_as_accurate(rotated[b, r], exact_q, exact_q.to(dtype))
    assert_as_accurate(block.dense(block.k_cache)[b, slot], exact_k, exact_k.to(dtype))
    assert same(block.dense(block.v_cache)[b, slot], block.v[b, r])
    assert not rotated[block.depth < 0].any()
    # All that was to be written is finite; so nothing else was written, in pages of nobody included.
    for cache in (block.k_cache, block.v_cache):
        assert cache.isfinite().sum() == len(rows) * cache[0, 0].numel()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [None, 1, 16])
@pytest.mark.parametrize(
    ("batch", "rows", "q_heads", "kv_heads", "n", "rotary"),
    [
        (1, 1, 9, 3, 64, 64),
        (2, 7, 4, 2, 80, 32),
        (3, 65, 2, 1, 80, 80),
        (1, 111, 3, 3, 96, 96),
        (2, 63, 1, 1, 128, 128),
        (2, 5, 2, 1, 7, 6),
        (2, 5, 2, 1, 8, 0),
    ],
)
def test_matches_float64(batch, rows, q_heads, kv_heads, n, rotary, page_size, dtype, backend, rng):
    if backend == "triton" and (rows, page_size, dtype) != (65, 16, torch.bfloat16):
        batch, rows = min(batch, 2), min(rows, 5)  # a row is two programs
    block = Block(rng, batch, rows, q_heads, kv_heads, n, rotary, dtype, padding=rows // 4)
    assert_correct(block.paged(page_size, rng) if page_size else block, backend)


@pytest.mark.parametrize("backend", ["ref", "triton"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_float8_caches(dtype, page_size, scaled, backend, rng):
    block = Block(rng, 2, 5, 3, 2, 24, 20, dtype, padding=1)
    plain = (block.paged(page_size, rng) if page_size else block).run("ref")
    k, v = block.k_cache.clone(), block.v_cache.clone()
    block.in_float8(scaled)
    assert torch.equal(block.run(backend), plain)
    for stored, exact, scale in ((block.k_cache, k, block.k_scale), (block.v_cache, v, block.v_scale)):
        written = exact.isfinite()
        assert torch.equal(stored.float().isfinite(), written)
        factor = torch.ones(2) if scale is None else scale
        meant = stored.float() * factor[:, None]
        error = (meant - exact)[written].abs() / exact[written].abs().clamp(min=0.1)
        assert error.max() < 2**-4 + 2**-7  # half a step of three bits, and k's own rounding


@pytest.mark.parametrize("backend", ["ref", "triton"])
def test_float8_rounds_once_and_stays_finite(backend, rng):
    """Every bfloat16 goes to the nearest float8, ties to even, beyond 448 to 448; NaN stays."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).view(1, 4, 128, 128)
    positions = torch.zeros(1, 0), torch.zeros(1, 0)
    caches = [torch.zeros(1, 4, 128, 128).to(torch.float8_e4m3fn) for _ in range(2)]
    esp_kernels.rope_append(
        values, values, values, *positions, int32(0), int32([0, 0, 0, 0]), *caches, backend=backend
    )
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()  # 0 to 448
    magnitude = values.double().abs().clamp(max=448).flatten()
    upper = torch.searchsorted(codes, magnitude).clamp(max=126)
    lower = (upper - 1).clamp(min=0)
    to_upper, to_lower = codes[upper] - magnitude, magnitude - codes[lower]
    code = torch.where((to_upper < to_lower) | ((to_upper == to_lower) & (upper % 2 == 0)), upper, lower)
    expected = torch.where(
        values.flatten().isnan(), torch.nan, codes[code] * (1 - 2.0 * values.flatten().signbit())
    )
    for cache in caches:
        assert torch.equal(cache.double().flatten().nan_to_num(7.0), expected.nan_to_num(7.0))


@given(seed=st.integers(0, 2**32), rows=st.integers(1, 20), batch=st.integers(1, 3), pages=st.integers(0, 7))
@settings(deadline=None, max_examples=40)
def test_any_tree_in_any_cache(seed, rows, batch, pages):
    torch.manual_seed(seed)
    rng = random.Random(seed)
    block = Block(
        rng, batch, rows, 3, 1, 24, 20, torch.bfloat16, rows + rng.randrange(9), rng.randrange(rows)
    )
    assert_correct(block.paged(pages, rng) if pages else block, "auto")


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_worse_than_transformers(dtype, backend, rng):
    block = Block(rng, 2, 9, 9, 3, 64, 64, dtype)
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(hidden_size=9 * 64, num_attention_heads=9, num_key_value_heads=3)
    rope = llama.LlamaRotaryEmbedding(config)
    position = block.prefix_len[:, None] + block.depth
    everywhere = torch.arange(POSITIONS)[None]
    table = rope(torch.zeros(1), everywhere)
    block.cos, block.sin = (t[0, :, :32].contiguous() for t in table)
    cos, sin = rope(block.q, position)
    q, k = llama.apply_rotary_pos_emb(block.q, block.k, cos, sin, unsqueeze_dim=2)
    cos, sin = (t[0].double()[position.long()] for t in table)
    exact_q, exact_k = llama.apply_rotary_pos_emb(
        block.q.double(), block.k.double(), cos, sin, unsqueeze_dim=2
    )
    rotated = block.run(backend)
    assert_as_accurate(rotated, exact_q, q, factor=1.0)
    for b, prefix in enumerate(block.prefix_len.tolist()):
        assert_as_accurate(block.k_cache[b, prefix : prefix + 9], exact_k[b], k[b], factor=1.0)


def test_position_is_depth_and_not_row_index(backend, rng):
    block = Block(rng, 1, 6, 2, 1, 16, 16, torch.float32)
    block.depth = int32([0, 1, 1, 1, 2, 1])
    for x in (block.q, block.k):
        x[:] = x[:, :1].clone()
    rotated = block.run(backend)[0]
    prefix = int(block.prefix_len)
    keys = block.k_cache[0, prefix : prefix + 6]
    for rows in (rotated, keys):
        assert all(torch.equal(rows[1], rows[r]) for r in (2, 3, 5))
        assert not torch.allclose(rows[1], rows[0]) and not torch.allclose(rows[1], rows[4])


def test_padding_is_harmless(backend, rng):
    block = Block(rng, 3, 9, 2, 1, 16, 16, torch.bfloat16, slots=12).paged(4, rng)
    block.depth[0, [2, 8]] = -1
    block.depth[1:] = -1
    block.q[block.depth < 0] = block.k[block.depth < 0] = block.v[block.depth < 0] = torch.inf
    # Row 8 would have no slot, and sequences 1 and 2 are junk altogether.
    block.prefix_len = int32(4, -(2**31), 2**31 - 1)
    block.block_table[1:] = int32(-1, 2**31 - 1, -7)
    rotated = block.run(backend)
    assert not rotated[block.depth < 0].any() and rotated[block.depth >= 0].isfinite().all()
    for cache in (block.k_cache, block.v_cache):
        assert cache.isfinite().sum() == 7 * 16 and not cache.isinf().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_neighbours(dtype, backend, rng):
    rows = 5 if backend == "triton" else 19
    block = Block(rng, 2, rows, 4, 2, 80, 40, dtype)
    whole = block.run(backend)
    k_cache, v_cache = block.k_cache.clone(), block.v_cache.clone()

    def assert_same_as_whole(rotated: torch.Tensor) -> None:
        assert torch.equal(rotated, whole)
        slots = k_cache.shape[1]
        assert same(block.dense(block.k_cache)[:, :slots], k_cache)
        assert same(block.dense(block.v_cache)[:, :slots], v_cache)

    for name in ("q", "k", "v"):
        setattr(block, name, strided(getattr(block, name)))
    block.k_cache = poisoned((2, 2, k_cache.shape[1], 80), dtype).transpose(1, 2)
    block.v_cache = strided(poisoned(v_cache.shape, dtype))
    assert_same_as_whole(block.run(backend))

    block.k_cache, block.v_cache = (poisoned(k_cache.shape, dtype) for _ in range(2))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert_same_as_whole(block.run(backend))
    finally:
        torch.set_num_threads(threads)

    block.k_cache = poisoned(k_cache.shape, dtype)
    assert_same_as_whole(block.paged(7, rng).run(backend))

    # Plain decoding: row r alone, as the root at its own position.
    for b, r in itertools.product(range(2), range(rows)):
        position = block.prefix_len[b : b + 1] + block.depth[b, r]
        one = [x[b : b + 1, r : r + 1] for x in (block.q, block.k, block.v)]
        caches = [poisoned((1, *k_cache.shape[1:]), dtype) for _ in range(2)]
        rotated = esp_kernels.rope_append(
            *one, block.cos, block.sin, position, int32([0]), *caches, backend=backend
        )
        assert torch.equal(rotated[0, 0], whole[b, r])
        assert same(caches[0][0, int(position)], k_cache[b, int(block.prefix_len[b]) + r])


@pytest.mark.skipif(not _backend.interpreting(), reason="calls an unchecked kernel on CPU tensors")
def test_rows_that_no_check_has_seen_are_harmless(rng):
    """Beyond the capacity, the pages or the positions, as they may be on a device: nothing is written."""
    from esp_kernels.triton.rope_append import rope_append

    block = Block(rng, 6, 3, 2, 1, 16, 16, torch.float32, slots=12).paged(4, rng)
    pages = block.k_cache.shape[0]
    block.prefix_len = int32(0, 10, -2, POSITIONS - 1, -(2**31), 2**31 - 1)
    block.depth = int32([0, 1, 2]).repeat(6, 1)
    block.block_table[0] = int32(pages)
    rotated = rope_append(*vars(block).values())
    for cache in (block.k_cache, block.v_cache):
        assert cache.isfinite().sum() == 3 * 16
        for b, slot in ((1, 10), (1, 11), (2, 0)):
            assert cache[block.block_table[b, slot // 4], slot % 4].isfinite().all()
    assert rotated[:2].any(dim=(2, 3)).all() and not rotated[4:].any()
    assert torch.equal(rotated[2].any(dim=(1, 2)), torch.tensor([False, False, True]))
    assert torch.equal(rotated[3].any(dim=(1, 2)), torch.tensor([True, False, False]))


@pytest.mark.parametrize(("batch", "rows"), [(0, 5), (2, 0), (0, 0)])
def test_empty(batch, rows, backend, rng):
    block = Block(rng, 2, 5, 2, 1, 8, 8, torch.float32)
    for name in ("q", "k", "v", "depth"):
        setattr(block, name, getattr(block, name)[:batch, :rows].contiguous())
    for name in ("prefix_len", "k_cache", "v_cache"):
        setattr(block, name, getattr(block, name)[:batch])
    assert block.run(backend).shape == (batch, rows, 2, 8)
    assert block.k_cache.isnan().all() and block.v_cache.isnan().all()


def arguments() -> dict:
    return {
        "q": torch.zeros(2, 3, 2, 8),
        "k": torch.ones(2, 3, 1, 8),
        "v": torch.ones(2, 3, 1, 8),
        "cos": torch.ones(16, 4),
        "sin": torch.zeros(16, 4),
        "prefix_len": int32(0, 0),
        "depth": int32([0, 1, 1], [0, 1, 2]),
        "k_cache": torch.zeros(2, 12, 1, 8),
        "v_cache": torch.zeros(2, 12, 1, 8),
        "block_table": None,
    }


@pytest.mark.on_host
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"q": torch.zeros(2, 3, 2, 8).double()}, "q must be float32, bfloat16 or float16, got float64"),
        ({"q": torch.zeros(2, 3, 16)}, "q must have shape [*, *, *, *], got [2, 3, 16]"),
        (
            {"q": torch.zeros(2, 3, 8, 2).mT},
            "q must have stride 1 in its last dimension, got strides [48, 16, 1, 2]",
        ),
        ({"k": torch.zeros(2, 4, 1, 8)}, "k must have shape [2, 3, *, 8], got [2, 4, 1, 8]"),
        ({"v": torch.zeros(2, 3, 2, 8)}, "v must have shape [2, 3, 1, 8], got [2, 3, 2, 8]"),
        ({"v": torch.zeros(2, 3, 1, 8).half()}, "v must be float32, got float16"),
        ({"cos": torch.zeros(16, 3).bfloat16()}, "cos must be float32, got bfloat16"),
        ({"cos": torch.zeros(16, 5)}, "cos must have at most 4 columns, half the head dimension, got 5"),
        ({"cos": torch.zeros(4, 16).t()}, "cos must be contiguous, got strides [1, 16]"),
        ({"sin": torch.zeros(15, 4)}, "sin must have shape [16, 4], got [15, 4]"),
        ({"prefix_len": torch.zeros(2).long()}, "prefix_len must be int32, got int64"),
        ({"depth": int32([0, 1, 2])}, "depth must have shape [2, 3], got [1, 3]"),
        ({"k_cache": torch.zeros(1, 12, 1, 8)}, "k_cache must have shape [2, *, 1, 8], got [1, 12, 1, 8]"),
        ({"v_cache": torch.zeros(2, 11, 1, 8)}, "v_cache must have shape [2, 12, 1, 8], got [2, 11, 1, 8]"),
        (
            {"k_cache": torch.zeros(2, 12, 1, 8).half()},
            "k_cache must be float32 or float8_e4m3fn, got float16",
        ),
        ({"v_cache": torch.zeros(2, 12, 1, 8).half()}, "v_cache must be float32, got float16"),
        ({"k_scale": torch.ones(1)}, "k_scale goes with float8_e4m3fn caches, got float32"),
        ({"v_scale": torch.ones(1)}, "v_scale goes with float8_e4m3fn caches, got float32"),
        ({"block_table": int32([0])}, "block_table must have shape [2, *], got [1, 1]"),
        ({"depth": int32([0, 1, 1], [0, 1, 3])}, "depth[1, 2] must be in -1..2, got 3"),
        ({"depth": int32([0, 1, 1], [0, -2, 1])}, "depth[1, 1] must be in -1..2, got -2"),
        ({"prefix_len": int32(-1, 0)}, "prefix_len[0] must be at least 0, got -1"),
        (
            {"prefix_len": int32(0, 10)},
            "prefix_len[1] + row 2 must be below the capacity of 12 slots, got 12",
        ),
        (
            {"prefix_len": int32(0, 2**31 - 1)},
            "prefix_len[1] + row 0 must be below the capacity of 12 slots, got 2147483647",
        ),
        (
            {"prefix_len": int32(0, 9), "cos": torch.zeros(10, 4), "sin": torch.zeros(10, 4)},
            "prefix_len[1] + depth[1, 1] must be below the 10 positions of cos, got 10",
        ),
        (
            {"block_table": int32([0], [2]), "prefix_len": int32(9, 9)},
            "block_table[1, 0] must be in 0..1, got 2",
        ),
        ({"block_table": int32([0], [-1])}, "block_table[1, 0] must be in 0..1, got -1"),
        (
            {"block_table": int32([], []).view(2, 0)},
            "prefix_len[0] + row 0 must be below the capacity of 0 slots, got 0",
        ),
        ({"q": None}, "q must be a tensor, got NoneType"),
    ],
)
def test_bad_input(change, sentence, backend):
    case = arguments() | change
    with pytest.raises(ValueError) as error:
        esp_kernels.rope_append(**case, backend=backend)
    assert str(error.value) == sentence
    assert not case["k_cache"].any() and not case["v_cache"].any()


FLOAT8 = torch.zeros(2, 12, 1, 8).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("backend", ["ref", "triton"])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"v_cache": torch.zeros(2, 12, 1, 8)}, "v_cache must be float8_e4m3fn, got float32"),
        ({"k_scale": torch.ones(2)}, "k_scale must have shape [1], got [2]"),
        ({"v_scale": torch.ones(1).half()}, "v_scale must be float32, got float16"),
    ],
)
def test_bad_float8_caches(change, sentence, backend):
    with pytest.raises(ValueError) as error:
        esp_kernels.rope_append(
            **(arguments() | {"k_cache": FLOAT8, "v_cache": FLOAT8} | change), backend=backend
        )
    assert str(error.value) == sentence


def test_cpp_refuses_float8_caches():
    with pytest.raises(ValueError) as error:
        esp_kernels.rope_append(**(arguments() | {"k_cache": FLOAT8, "v_cache": FLOAT8}), backend="cpp")
    sentence = "k_cache is float8_e4m3fn, which backend 'cpp' does not write; 'ref' and 'triton' do"
    assert str(error.value) == sentence


def test_opcheck(rng):
    for page_size in (None, 4):
        block = Block(rng, 2, 5, 2, 1, 8, 6, torch.float32)
        block = block.paged(page_size, rng) if page_size else block
        block.k_cache, block.v_cache = torch.zeros_like(block.k_cache), torch.zeros_like(block.v_cache)
        torch.library.opcheck(torch.ops.esp_kernels.rope_append.default, tuple(vars(block).values()))
