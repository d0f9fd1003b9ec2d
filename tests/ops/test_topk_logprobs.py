import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import esp_kernels
from esp_kernels.testing import strided

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF = math.inf
EPS = torch.finfo(torch.float32).eps


def oracle(logits: list[float], k: int) -> tuple[list[float], list[int]]:
    """One row, by sorting and in float64."""
    clean = [-INF if math.isnan(x) else x for x in logits]
    ids = sorted(range(len(clean)), key=lambda i: (-clean[i], i))[:k]
    highest = max(clean)
    if highest == -INF:
        return [-INF] * k, ids
    if highest == INF:
        return [-math.log(clean.count(INF)) if clean[i] == INF else -INF for i in ids], ids
    total = math.log(math.fsum(math.exp(x - highest) for x in clean))
    return [clean[i] - highest - total for i in ids], ids


def check(logits: torch.Tensor, k: int, backend: str = "auto") -> None:
    """The op against the oracle. The sum may be wrong by a few roundings, whatever its logarithm is."""
    logprobs, ids = esp_kernels.topk_logprobs(logits, k, backend=backend)
    assert logprobs.shape == ids.shape == (*logits.shape[:-1], k)
    assert logprobs.dtype == torch.float32 and ids.dtype == torch.int32
    assert logprobs.is_contiguous() and ids.is_contiguous()
    expected = [oracle(row, k) for row in logits.reshape(-1, logits.shape[-1]).tolist()]
    assert ids.reshape(-1, k).tolist() == [row[1] for row in expected]
    exact = torch.tensor([row[0] for row in expected], dtype=torch.float64)
    torch.testing.assert_close(logprobs.view(-1, k).double(), exact, atol=2 * EPS, rtol=2 * EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1,), (7, 63), (2, 3, 65), (3, 111), (2, 511), (2, 512), (2, 513), (3, 1030), (1, 2, 5003)]
)
def test_matches_float64(shape, dtype, backend, rng):
    logits = (torch.randn(shape) * 4).to(dtype)
    for k in {1, min(shape[-1], 8), min(shape[-1], 256)}:
        check(logits, k, backend)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_whole_vocabulary(dtype, backend, rng):
    for spread in (0.01, 1, 10):
        check((torch.randn(2, 49152) * spread).to(dtype), 12, backend)


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 200, 256])
def test_k_may_be_all_of_them(size, backend, rng):
    check(torch.randn(3, size), size, backend)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_any_mixture_of_values(backend, data, dtype):
    size = data.draw(st.integers(1, 700))
    values = data.draw(
        st.lists(
            st.sampled_from([0.0, -0.0, 1.0, -1.0, 3.5, 60000.0, -60000.0, INF, -INF, math.nan])
            | st.floats(-20, 20, width=16),
            min_size=1,
            max_size=12,
        )
    )
    torch.manual_seed(size)
    picks = torch.randint(len(values), (2, size))
    check(torch.tensor(values)[picks].to(dtype), data.draw(st.integers(1, min(size, 256))), backend)


def test_infinities_in_several_parts(backend):
    """Of a vocabulary of many splits, some with nothing but -inf and some with +inf."""
    logits = torch.full((3, 20_000), -INF)
    logits[0, [4000, 17_000]] = torch.tensor([1.0, 1.0])
    logits[1, 9000:] = 0.0
    logits[1, [12_000, 19_999]] = INF
    logits[2, 19_998] = 5.0
    logprobs, ids = esp_kernels.topk_logprobs(logits, 3, backend=backend)
    assert ids.tolist() == [[4000, 17_000, 0], [12_000, 19_999, 9000], [19_998, 0, 1]]
    half = -math.log(2)
    expected = torch.tensor([[half, half, -INF], [half, half, -INF], [0.0, -INF, -INF]])
    torch.testing.assert_close(logprobs, expected, atol=2 * EPS, rtol=0)


@pytest.mark.parametrize("k", [1, 5, 256])
def test_ties_go_to_the_lowest_id(k, backend):
    logits = torch.full((2, 1500), 2.0)
    logits[1, 7::100] = 3.0
    check(logits, k, backend)
    first = list(range(7, 1500, 100))
    ids = esp_kernels.topk_logprobs(logits, k, backend=backend)[1].tolist()
    assert ids[0] == list(range(k))
    assert ids[1] == (first + [i for i in range(1500) if i not in first])[:k]


def test_both_zeros_are_one_logit(backend):
    logits = torch.tensor([-0.0, 0.0, -0.0, -1.0, 0.0])
    assert esp_kernels.topk_logprobs(logits, 4, backend=backend)[1].tolist() == [0, 1, 2, 4]


@pytest.mark.parametrize("k", [1, 3, 256])
def test_sorted_input(k, backend):
    rising = torch.arange(6000.0) / 100
    check(torch.stack([rising, rising.flip(0)]), k, backend)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite(dtype, backend):
    logits = torch.full((5, 600), -INF)
    logits[1] = torch.nan
    logits[2, [5, 520, 599]] = torch.tensor([1.0, 2.0, 2.0])
    logits[3] = 0.5
    logits[3, [9, 530]] = INF
    logits[4, 555] = -7.0
    logits[4, :550] = torch.nan
    logprobs, ids = esp_kernels.topk_logprobs(logits.to(dtype), 4, backend=backend)
    assert ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [520, 599, 5, 0], [9, 530, 0, 1], [555, 0, 1, 2]]
    total = math.log(2 + math.exp(-1))
    expected = [
        [-INF] * 4,
        [-INF] * 4,
        [-total, -total, -1 - total, -INF],
        [-math.log(2), -math.log(2), -INF, -INF],
        [0, -INF, -INF, -INF],
    ]
    torch.testing.assert_close(logprobs, torch.tensor(expected), atol=2 * EPS, rtol=2 * EPS)


def test_far_apart(backend):
    largest = torch.finfo(torch.float32).max
    logits = torch.tensor([[largest, -largest, 0.0], [1e30, 1e30, -1e30], [-88.0, 0.0, -104.0]])
    logprobs, ids = esp_kernels.topk_logprobs(logits, 3, backend=backend)
    assert ids.tolist() == [[0, 2, 1], [0, 1, 2], [1, 0, 2]]
    assert logprobs[0].tolist() == [0.0, -largest, -INF]
    assert logprobs[2].tolist() == [0.0, -88.0, -104.0]
    assert logprobs[1, 0] == logprobs[1, 1] == torch.tensor(-math.log(2))


# PyTorch's own sums do not promise it.
@pytest.mark.parametrize("backend", ["cpp", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_neighbours(dtype, backend, rng):
    logits = (torch.randn(13, 9001) * 3).to(dtype)
    logprobs, ids = esp_kernels.topk_logprobs(logits, 9, backend=backend)
    order = torch.randperm(13)
    for a, b in zip(
        esp_kernels.topk_logprobs(logits[order], 9, backend=backend), (logprobs, ids), strict=True
    ):
        assert torch.equal(a, b[order])
    for r in range(13):
        one = esp_kernels.topk_logprobs(logits[r], 9, backend=backend)
        assert torch.equal(one[0], logprobs[r]) and torch.equal(one[1], ids[r])


def test_k_does_not_change_the_values(backend, rng):
    logits = torch.randn(3, 2000)
    most = esp_kernels.topk_logprobs(logits, 256, backend=backend)
    for k in (1, 2, 31, 255):
        for a, b in zip(esp_kernels.topk_logprobs(logits, k, backend=backend), most, strict=True):
            assert torch.equal(a, b[:, :k])


@pytest.mark.parametrize("backend", ["cpp", "triton"])
def test_threads_and_strides_change_nothing(backend, rng):
    logits = torch.randn(4, 3, 2, 1001)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = esp_kernels.topk_logprobs(logits, 5, backend=backend)
    finally:
        torch.set_num_threads(threads)
    across = logits.transpose(0, 1).contiguous().transpose(0, 1)
    apart = logits.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
    for view in (logits, strided(logits), across, apart):
        for a, b in zip(esp_kernels.topk_logprobs(view, 5, backend=backend), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(0, 9), (2, 0, 9)])
def test_empty(shape, backend):
    logprobs, ids = esp_kernels.topk_logprobs(torch.zeros(shape), 3, backend=backend)
    assert logprobs.shape == ids.shape == (*shape[:-1], 3)


@pytest.mark.on_host
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"logits": torch.zeros(3, 8).int()}, "logits must be float32, bfloat16 or float16, got int32"),
        ({"logits": torch.tensor(1.0)}, "logits must have at least 1 dimension, got 0"),
        (
            {"logits": torch.zeros(3, 0)},
            "logits must have at least 1 element in its last dimension, got 0",
        ),
        (
            {"logits": torch.zeros(8, 3).t()},
            "logits must have stride 1 in its last dimension, got strides [1, 3]",
        ),
        ({"k": 0}, "k must be between 1 and 8, got 0"),
        ({"k": 9}, "k must be between 1 and 8, got 9"),
        ({"logits": torch.zeros(3, 300), "k": 257}, "k must be between 1 and 256, got 257"),
        ({"logits": None}, "logits must be a tensor, got NoneType"),
    ],
)
def test_bad_input(change, sentence, backend):
    with pytest.raises(ValueError) as error:
        esp_kernels.topk_logprobs(**{"logits": torch.zeros(3, 8), "k": 2} | change, backend=backend)
    assert str(error.value) == sentence


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype):
    torch.library.opcheck(torch.ops.esp_kernels.topk_logprobs.default, (torch.randn(2, 3, 9).to(dtype), 4))
