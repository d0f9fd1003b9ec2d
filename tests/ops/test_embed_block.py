import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import esp_kernels
from esp_kernels import _backend
from esp_kernels.testing import strided

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def int32(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def assert_embeds(tokens, ordinals, embedding, probe, backend) -> torch.Tensor:
    x = esp_kernels.embed_block(int32(*tokens), int32(*ordinals), embedding, probe, backend=backend)
    assert x.dtype == embedding.dtype and x.is_contiguous()
    assert x.shape == (len(tokens), len(tokens[0]), embedding.shape[1])
    for b, row in enumerate(tokens):
        for r, token in enumerate(row):
            i = ordinals[b][r]
            expected = embedding[token] if i == 0 else probe[b, i - 1].to(x.dtype) if i > 0 else 0 * x[b, r]
            assert torch.equal(x[b, r], expected)
    return x


@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 3),
    rows=st.sampled_from([1, 7, 63, 65, 111]),
    masks=st.integers(0, 3),
    n=st.sampled_from([1, 7, 16, 63, 65, 576, 1030]),
    dtype=st.sampled_from(DTYPES),
)
@settings(deadline=None, max_examples=30)
def test_every_row_is_its_token_or_its_mask(backend, seed, batch, rows, masks, n, dtype):
    torch.manual_seed(seed)
    rng = random.Random(seed)
    if backend == "triton":
        rows = min(rows, 9)  # a program each
    embedding, probe = torch.randn(50, n).to(dtype), torch.randn(batch, masks, n)
    if rng.random() < 0.5:
        embedding, probe = strided(embedding), strided(probe).transpose(0, 1).contiguous().transpose(0, 1)
    ordinals = [[rng.randrange(-1, masks + 1) for _ in range(rows)] for _ in range(batch)]
    # Rows that hold no token may hold anything there.
    tokens = [
        [rng.randrange(50) if o == 0 else rng.choice([-1, 50, 2**31 - 1]) for o in row] for row in ordinals
    ]
    assert_embeds(tokens, ordinals, embedding, probe, backend)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_pass_through(dtype, backend):
    """Tokens are copied, the probe is rounded to nearest even; NaN and infinities survive both."""
    values = [
        torch.nan,
        torch.inf,
        -torch.inf,
        -0.0,
        1e-40,
        1 + 2**-8,
        1 + 3 * 2**-8,
        1 + 2**-11,
        65520.0,
        3e38,
    ]
    values = values * 3  # in the vector body and in the tail
    embedding = torch.tensor([values]).to(dtype)
    probe = torch.tensor([[values]])
    x = esp_kernels.embed_block(int32([0, -1]), int32([0, 1]), embedding, probe, backend=backend)
    for row, expected in ((x[0, 0], embedding[0]), (x[0, 1], probe[0, 0].to(dtype))):
        assert torch.equal(row.nan_to_num(7.0), expected.nan_to_num(7.0))
        number = ~expected.isnan()
        assert torch.equal(row.signbit()[number], expected.signbit()[number])


def test_padding_reads_nothing(backend):
    embedding, probe = torch.full((3, 8), torch.nan), torch.full((1, 2, 8), torch.nan)
    x = esp_kernels.embed_block(int32([-1, 2**31 - 1]), int32([-1, -1]), embedding, probe, backend=backend)
    assert torch.equal(x, torch.zeros(1, 2, 8))


@pytest.mark.parametrize("backend", ["ref", "cpp"])
def test_threads_change_nothing(backend, rng):
    embedding, probe = torch.randn(50, 576).bfloat16(), torch.randn(2, 3, 576)
    ordinals = [[rng.randrange(-1, 4) for _ in range(111)] for _ in range(2)]
    tokens = [[rng.randrange(50) for _ in range(111)] for _ in range(2)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = assert_embeds(tokens, ordinals, embedding, probe, backend)
        torch.set_num_threads(2)
        assert torch.equal(assert_embeds(tokens, ordinals, embedding, probe, backend), one)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not _backend.interpreting(), reason="calls an unchecked kernel on CPU tensors")
def test_ids_that_no_check_has_seen_read_nothing():
    from esp_kernels.triton.embed_block import embed_block

    tokens, ordinals = int32([-1, 3, 2, 0, 2**31 - 1, -(2**31)]), int32([0, 0, 0, 3, -5, 0])
    embedding, probe = torch.randn(3, 8), torch.randn(1, 2, 8)
    expected = torch.zeros(1, 6, 8)
    expected[0, 2] = embedding[2]
    assert torch.equal(embed_block(tokens, ordinals, embedding, probe), expected)


@pytest.mark.parametrize(("batch", "rows"), [(0, 5), (2, 0), (0, 0)])
def test_empty(batch, rows, backend):
    rows_of_none = torch.zeros(batch, rows, dtype=torch.int32)
    x = esp_kernels.embed_block(
        rows_of_none, rows_of_none, torch.randn(5, 8), torch.randn(batch, 2, 8), backend=backend
    )
    assert x.shape == (batch, rows, 8)


@pytest.mark.on_host
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"embedding": torch.zeros(10, 8).double()},
            "embedding must be float32, bfloat16 or float16, got float64",
        ),
        ({"embedding": torch.zeros(80)}, "embedding must have shape [*, *], got [80]"),
        (
            {"embedding": torch.zeros(8, 10).t()},
            "embedding must have stride 1 in its last dimension, got strides [1, 10]",
        ),
        ({"tokens": torch.zeros(2, 3).long()}, "tokens must be int32, got int64"),
        ({"tokens": int32(0, 1, 2)}, "tokens must have shape [*, *], got [3]"),
        ({"tokens": int32([0, 0], [1, 1], [2, 2]).t()}, "tokens must be contiguous, got strides [1, 2]"),
        ({"mask_ordinal": int32([0, 1])}, "mask_ordinal must have shape [2, 3], got [1, 2]"),
        ({"probe": torch.zeros(2, 2, 8).bfloat16()}, "probe must be float32, got bfloat16"),
        ({"probe": torch.zeros(1, 2, 8)}, "probe must have shape [2, *, 8], got [1, 2, 8]"),
        ({"probe": torch.zeros(2, 2, 7)}, "probe must have shape [2, *, 8], got [2, 2, 7]"),
        (
            {"probe": torch.zeros(2, 8, 2).mT},
            "probe must have stride 1 in its last dimension, got strides [16, 1, 2]",
        ),
        ({"mask_ordinal": int32([0, 1, 2], [0, 1, 3])}, "mask_ordinal[1, 2] must be in -1..2, got 3"),
        ({"mask_ordinal": int32([0, -2, 2], [0, 1, 2])}, "mask_ordinal[0, 1] must be in -1..2, got -2"),
        (
            {"tokens": int32([3, -1, -1], [10, -1, -1])},
            "tokens[1, 0] must be in the vocabulary of 10 tokens, got 10",
        ),
        (
            {"tokens": int32([-1, -1, -1], [5, -1, -1])},
            "tokens[0, 0] must be in the vocabulary of 10 tokens, got -1",
        ),
        ({"tokens": 3}, "tokens must be a tensor, got int"),
    ],
)
def test_bad_input(change, sentence, backend):
    arguments = {
        "tokens": int32([3, -1, -1], [5, -1, -1]),
        "mask_ordinal": int32([0, 1, 2], [0, 1, -1]),
        "embedding": torch.zeros(10, 8),
        "probe": torch.zeros(2, 2, 8),
    } | change
    with pytest.raises(ValueError) as error:
        esp_kernels.embed_block(**arguments, backend=backend)
    assert str(error.value) == sentence


def test_opcheck():
    tokens, ordinals = int32([3, -1, -1], [5, -1, -1]), int32([0, 1, 2], [0, 1, -1])
    arguments = (tokens, ordinals, torch.randn(10, 8).bfloat16(), torch.randn(2, 2, 8))
    torch.library.opcheck(torch.ops.esp_kernels.embed_block.default, arguments)
