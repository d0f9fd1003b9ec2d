import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import esp_kernels
from esp_kernels.testing import assert_as_accurate, strided

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def integers(shape, dtype, low=-8, high=8):
    """Values whose products and sums are exact in float32, so that results must be equal, not close."""
    return torch.randint(low, high + 1, shape).to(dtype)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    y = (x.double().unsqueeze(-2) * weight.double()).sum(-1)
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (31, 2), (32, 63), (33, 7), (65, 128), (111, 129)])
def test_pack_linear_puts_every_weight_where_it_says(n, k, dtype, rng):
    weight = torch.randn(n, k).to(dtype)
    packed = esp_kernels.pack_linear(strided(weight))
    pairs = dtype == torch.bfloat16
    assert packed.shape == (((n + 31) // 32, (k + 1) // 2, 32, 2) if pairs else ((n + 31) // 32, k, 32))
    assert packed.is_contiguous() and packed.dtype == dtype
    for i in range(n):
        for j in range(k):
            at = (i // 32, j // 2, i % 32, j % 2) if pairs else (i // 32, j, i % 32)
            assert packed[at] == weight[i, j]
            packed[at] = 0
    assert not packed.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("shape", "n"),
    [((1,), 1), ((63,), 65), ((7, 65), 31), ((2, 5, 129), 111), ((2, 1, 3, 256), 64), ((111, 577), 97)],
)
def test_matches_float64(shape, n, bias, dtype, backend, rng):
    x, weight = torch.randn(shape).to(dtype), torch.randn(n, shape[-1]).to(dtype)
    b = torch.randn(n).to(dtype) if bias else None
    y = esp_kernels.linear_rows(x, esp_kernels.pack_linear(weight), n, b, backend=backend)
    assert y.dtype == dtype and y.is_contiguous()
    assert_as_accurate(y, exact(x, weight, b), torch.nn.functional.linear(x, weight, b))


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(0, 40),
    k=st.integers(1, 300),
    n=st.integers(1, 100),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_rounds_the_exact_sum_once(rows, k, n, dtype, seed):
    torch.manual_seed(seed)
    x, weight, bias = integers((rows, k), dtype), integers((n, k), dtype), integers((n,), dtype)
    y = esp_kernels.linear_rows(x, esp_kernels.pack_linear(weight), n, bias)
    assert torch.equal(y, exact(x, weight, bias).to(dtype))


@pytest.mark.parametrize("rows", [1, 13])
def test_subnormal_and_largest_float16_weights(rows, backend, rng):
    k, n = 37, 45
    for scale in (2.0**-24, 4096.0):
        weight = integers((n, k), torch.float16) * scale
        x = integers((rows, k), torch.float16)
        y = esp_kernels.linear_rows(x, esp_kernels.pack_linear(weight), n, backend=backend)
        assert torch.equal(y, exact(x, weight).to(torch.float16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_their_number(dtype, rng):
    k, n = 301, 75
    x, packed = torch.randn(130, k).to(dtype), esp_kernels.pack_linear(torch.randn(n, k).to(dtype))
    bias = torch.randn(n).to(dtype)
    alone = torch.cat([esp_kernels.linear_rows(x[r : r + 1], packed, n, bias) for r in range(130)])
    for rows in range(1, 131):
        assert torch.equal(esp_kernels.linear_rows(x[:rows], packed, n, bias), alone[:rows])
    order = torch.randperm(130)
    assert torch.equal(esp_kernels.linear_rows(x[order], packed, n, bias), alone[order])


def test_a_row_of_the_reference_does_not_depend_on_their_number(rng):
    k, n = 301, 75
    x, packed = torch.randn(9, k), esp_kernels.pack_linear(torch.randn(n, k))
    block = esp_kernels.linear_rows(x, packed, n, backend="ref")
    for r in range(9):
        assert torch.equal(esp_kernels.linear_rows(x[r], packed, n, backend="ref"), block[r])


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_than_are_packed_at_once(dtype, rng):
    k, n = 5, 33
    x, weight = integers((4001, k), dtype), integers((n, k), dtype)
    y = esp_kernels.linear_rows(x, esp_kernels.pack_linear(weight), n)
    assert torch.equal(y, exact(x, weight).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 17, 250])
def test_threads_change_nothing(rows, dtype, rng):
    x, packed = torch.randn(rows, 130).to(dtype), esp_kernels.pack_linear(torch.randn(200, 130).to(dtype))
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            results.append(esp_kernels.linear_rows(x, packed, 200))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(y, results[0]) for y in results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_change_nothing(dtype, backend, rng):
    x, packed = torch.randn(3, 14, 66).to(dtype), esp_kernels.pack_linear(torch.randn(40, 66).to(dtype))
    y = esp_kernels.linear_rows(x, packed, 40, backend=backend)
    for view in (strided(x), x.transpose(0, 1).contiguous().transpose(0, 1), strided(x)[:, ::2]):
        expected = y if view.shape == x.shape else y[:, ::2]
        assert not view.is_contiguous()
        assert torch.equal(esp_kernels.linear_rows(view, packed, 40, backend=backend), expected)
    repeated = x[:1, :1].expand(3, 14, 66)
    assert torch.equal(esp_kernels.linear_rows(repeated, packed, 40, backend=backend), y[:1, :1].expand_as(y))
    column = torch.randn(6, 5).to(dtype).t()[:, 1:2]
    one = esp_kernels.pack_linear(torch.ones(3, 1, dtype=dtype))
    assert torch.equal(esp_kernels.linear_rows(column, one, 3, backend=backend), column.expand(5, 3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_in_its_row(dtype, backend, rng):
    k, n = 65, 40
    x, packed = torch.randn(14, k).to(dtype), esp_kernels.pack_linear(torch.randn(n, k).to(dtype))
    clean = esp_kernels.linear_rows(x, packed, n, backend=backend)
    x[3, 64], x[8, 0] = torch.nan, torch.inf
    y = esp_kernels.linear_rows(x, packed, n, backend=backend)
    assert y[3].isnan().all() and y[8].isinf().all()
    others = [r for r in range(14) if r not in (3, 8)]
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("shape", [(0, 7), (2, 0, 7)])
def test_empty(shape, backend):
    packed = esp_kernels.pack_linear(torch.randn(5, 7))
    assert esp_kernels.linear_rows(torch.zeros(shape), packed, 5, backend=backend).shape == (*shape[:-1], 5)


@pytest.mark.on_host
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"x": torch.zeros(3, 8).double()}, "x must be float32, bfloat16 or float16, got float64"),
        ({"x": torch.tensor(1.0)}, "x must have at least 1 dimension, got 0"),
        ({"x": torch.zeros(3, 0)}, "x must have at least 1 element in its last dimension, got 0"),
        ({"x": torch.zeros(8, 3).t()}, "x must have stride 1 in its last dimension, got strides [1, 3]"),
        ({"x": torch.zeros(3, 7)}, "packed_weight must have shape [2, 7, 32], got [2, 8, 32]"),
        ({"x": torch.zeros(3, 8).half()}, "packed_weight must be float16, got float32"),
        (
            {"x": torch.zeros(3, 7).bfloat16(), "packed_weight": torch.zeros(2, 7, 32).bfloat16()},
            "packed_weight must have shape [2, 4, 32, 2], got [2, 7, 32]",
        ),
        (
            {"packed_weight": torch.zeros(2, 32, 8).transpose(1, 2)},
            "packed_weight must be contiguous, got strides [256, 1, 8]",
        ),
        ({"out_features": 0}, "out_features must be at least 1, got 0"),
        ({"out_features": 65}, "packed_weight must have shape [3, 8, 32], got [2, 8, 32]"),
        ({"bias": torch.zeros(33)}, "bias must have shape [40], got [33]"),
        ({"bias": torch.zeros(40).half()}, "bias must be float32, got float16"),
        ({"bias": torch.zeros(80)[::2]}, "bias must be contiguous, got strides [2]"),
        ({"x": None}, "x must be a tensor, got NoneType"),
    ],
)
def test_bad_input(change, sentence, backend):
    good = {"x": torch.zeros(3, 8), "packed_weight": torch.zeros(2, 8, 32), "out_features": 40, "bias": None}
    with pytest.raises(ValueError) as error:
        esp_kernels.linear_rows(**good | change, backend=backend)
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("weight", "sentence"),
    [
        ([[1.0]], "weight must be a tensor, got list"),
        (torch.zeros(2, 3).int(), "weight must be float32, bfloat16 or float16, got int32"),
        (torch.zeros(3), "weight must have shape [*, *], got [3]"),
        (torch.zeros(0, 3), "weight must not be empty, got shape [0, 3]"),
    ],
)
def test_bad_weight(weight, sentence):
    with pytest.raises(ValueError) as error:
        esp_kernels.pack_linear(weight)
    assert str(error.value) == sentence


def test_devices_must_agree():
    with pytest.raises(ValueError, match=r"^packed_weight must be on cpu, got meta$"):
        esp_kernels.linear_rows(torch.zeros(3, 8), torch.zeros(1, 8, 32, device="meta"), 5, backend="ref")


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype):
    packed = esp_kernels.pack_linear(torch.randn(5, 7).to(dtype))
    for bias in (None, torch.randn(5).to(dtype)):
        arguments = (torch.randn(2, 3, 7).to(dtype), packed, 5, bias)
        torch.library.opcheck(torch.ops.esp_kernels.linear_rows.default, arguments)
