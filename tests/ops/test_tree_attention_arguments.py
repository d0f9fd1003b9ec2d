import pytest
import torch

import esp_kernels
from esp_kernels import _backend
from esp_kernels.testing import random_tree
from tests.emulator import build

from . import oracle
from .blocks import KERNELS, block, dtype_of


@pytest.mark.parametrize(("batch", "rows"), [(0, 3), (2, 0)])
def test_empty(batch, rows, backend):
    dtype = dtype_of(backend)
    out, lse = esp_kernels.tree_attention(
        torch.zeros(batch, rows, 4, 64, dtype=dtype),
        torch.zeros(batch, 9, 2, 64, dtype=dtype),
        torch.zeros(batch, 9, 2, 64, dtype=dtype),
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


@pytest.mark.on_host
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
        (
            {"k_cache": torch.zeros(1, 8, 2, 64).half()},
            "k_cache must be float32 or float8_e4m3fn, got float16",
        ),
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
        ({"k_scale": torch.ones(2)}, "k_scale goes with float8_e4m3fn caches, got float32"),
        ({"v_scale": torch.ones(2)}, "v_scale goes with float8_e4m3fn caches, got float32"),
    ],
)
def test_bad_input(change, sentence, backend):
    with pytest.raises(ValueError) as error:
        esp_kernels.tree_attention(**(arguments() | change), backend=backend)
    assert str(error.value) == sentence


FLOAT8 = torch.zeros(1, 8, 2, 64).to(torch.float8_e4m3fn)
FLOAT8_CACHES = {"k_cache": FLOAT8, "v_cache": FLOAT8}


@pytest.mark.parametrize("backend", ["ref", "triton"])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"k_cache": FLOAT8}, "v_cache must be float8_e4m3fn, got float32"),
        ({"v_cache": FLOAT8}, "v_cache must be float32, got float8_e4m3fn"),
        (FLOAT8_CACHES | {"k_scale": torch.ones(4)}, "k_scale must have shape [2], got [4]"),
        (FLOAT8_CACHES | {"v_scale": torch.ones(2).half()}, "v_scale must be float32, got float16"),
    ],
)
def test_bad_float8_caches(change, sentence, backend):
    with pytest.raises(ValueError) as error:
        esp_kernels.tree_attention(**(arguments() | change), backend=backend)
    assert str(error.value) == sentence


def test_cpp_refuses_float8_caches():
    with pytest.raises(ValueError) as error:
        esp_kernels.tree_attention(**(arguments() | FLOAT8_CACHES), backend="cpp")
    sentence = "k_cache is float8_e4m3fn, which backend 'cpp' does not read; 'ref' and 'triton' do"
    assert str(error.value) == sentence


@pytest.mark.skipif(build.load() is None, reason="no C++ compiler to emulate CUDA with")
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, "it takes bfloat16 and float16, got float32; backend 'triton' takes it"),
        (FLOAT8_CACHES, "it takes bfloat16 and float16, got float32; backend 'triton' takes it"),
        (
            {"q": torch.zeros(1, 3, 4, 64).half()} | FLOAT8_CACHES,
            "it reads caches of q's dtype, got float8_e4m3fn; backend 'triton' reads it",
        ),
        (
            {
                "q": torch.zeros(1, 3, 4, 64).half(),
                "k_cache": torch.zeros(1, 8, 2, 64).half(),
                "v_cache": torch.zeros(1, 8, 2, 68).half()[..., :64],
            },
            "v_cache must have strides of multiples of 16 bytes, got strides [1088, 136, 68, 1]; "
            "backend 'triton' takes any",
        ),
        (
            {
                "q": torch.zeros(1 + 3 * 4 * 64).half()[1:].view(1, 3, 4, 64),
                "k_cache": torch.zeros(1, 8, 2, 64).half(),
                "v_cache": torch.zeros(1, 8, 2, 64).half(),
            },
            "q must start at a multiple of 16 bytes; backend 'triton' takes any start",
        ),
    ],
)
def test_cuda_says_what_it_does_not_serve(change, sentence):
    with pytest.raises(ValueError) as error:
        esp_kernels.tree_attention(**(arguments() | change), backend="cuda")
    assert str(error.value) == f"backend 'cuda' cannot serve tree_attention: {sentence}"


def test_pages_that_are_not_in_use_may_be_anything(backend):
    given = arguments() | PAGES | {"block_table": ints(3, 1, -7, 99)}
    for name in ("q", "k_cache", "v_cache"):
        given[name] = given[name].to(dtype_of(backend))
    out, _ = esp_kernels.tree_attention(**given, backend=backend)
    assert not out.isnan().any()


@pytest.mark.parametrize("optional", [False, True])
def test_opcheck(optional):
    options = (None, 0.1, 3, 5.0, torch.zeros(4)) if optional else ()
    values = tuple(arguments().values())
    torch.library.opcheck(torch.ops.esp_kernels.tree_attention.default, values + options)


def test_outputs_are_fresh_and_inputs_untouched(backend, rng):
    case = block([9], [random_tree(5, rng)], dtype=dtype_of(backend))
    q, k, v = (x.clone() for x in (case.q, case.k, case.v))
    out, lse = case.run(backend, (case.k, case.v))
    assert out.is_contiguous() and lse.is_contiguous() and lse.dtype == torch.float32
    assert torch.equal(q, case.q) and torch.equal(k, case.k) and torch.equal(v, case.v)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("page_size", [None, 4])
def test_lengths_and_pages_that_no_launch_can_check_do_no_harm(page_size, backend, rng):
    """On a device nobody looks at them: a kernel must not leave the cache, whatever they are."""
    tree_attention = _backend.unchecked("tree_attention", backend)
    dtype = dtype_of(backend)
    ancestors, depth = oracle.metadata([[-1, 0, 1]] * 3)
    q = torch.randn(3, 3, 4, 32, dtype=dtype)
    prefix_len = torch.tensor([2**30, -(2**30), 15], dtype=torch.int32)
    if page_size is None:
        cache, table = torch.randn(3, 16, 2, 32, dtype=dtype), None
    else:
        cache = torch.randn(9, page_size, 2, 32, dtype=dtype)
        table = torch.full((3, 4), 2**30, dtype=torch.int32)
    out, _ = tree_attention(q, cache, cache, prefix_len, ancestors, depth, table)
    assert out.shape == q.shape
