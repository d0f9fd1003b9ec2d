import pytest
import torch

import esp_kernels
from esp_kernels.testing import assert_as_accurate, strided

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def exact(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


def eager(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(2,), (14,), (7, 126), (2, 5, 130), (2, 3, 4, 222), (1, 60, 3072), (0, 64), (3, 0)]
)
def test_matches_float64(shape, dtype, backend, rng):
    gate_up = (torch.randn(shape) * 3).to(dtype)
    y = esp_kernels.swiglu(gate_up, backend=backend)
    assert y.dtype == dtype and y.is_contiguous()
    assert_as_accurate(y, exact(gate_up), eager(gate_up), factor=1.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_gate_of_16_bits(dtype, backend):
    """All 65536 bit patterns, rounded once from a silu that is exact to a few float32 ulp."""
    gate = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(32, 2048)
    gate_up = torch.cat([gate, torch.ones_like(gate)], -1)
    y = esp_kernels.swiglu(gate_up, backend=backend)
    wide = esp_kernels.swiglu(gate_up.float(), backend=backend)
    assert torch.equal(y.nan_to_num(7.0), wide.to(dtype).nan_to_num(7.0))
    assert torch.equal(y.isnan(), gate.isnan())


def test_float32_gates(backend):
    gate = torch.cat(
        [torch.linspace(-87, 100, 200_003), torch.logspace(-37, 38, 1001), -torch.logspace(-37, 1, 999)]
    )
    y = esp_kernels.swiglu(torch.cat([gate, torch.ones_like(gate)]), backend=backend)
    truth = gate.double() / (1 + (-gate.double()).exp())
    error = ((y.double() - truth) / truth).abs().max().item()
    assert error < 5 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("place", [0, 16])
def test_extremes(place, backend):
    """In the vector body and in the tail."""
    inf, nan = torch.inf, torch.nan
    cases = [
        (-inf, 1.0, 0.0),
        (-inf, -3e38, 0.0),
        (-3.4e38, 3.4e38, 0.0),
        (-1e4, 1.0, 0.0),
        (-128.0, 1.0, 0.0),
        (-88.0, 1.0, 0.0),
        (-0.0, 5.0, 0.0),
        (0.0, -5.0, 0.0),
        (1e-38, 1.0, 5e-39),
        (88.8, 1.0, 88.8),
        (3e38, 1.0, 3e38),
        (3e38, 2.0, inf),
        (inf, -1.0, -inf),
        (inf, 0.0, nan),
        (nan, 1.0, nan),
        (1.0, nan, nan),
    ]
    gate_up = torch.zeros(2, 21)
    for gate, up, expected in cases:
        gate_up[0, place : place + 5], gate_up[1, place : place + 5] = gate, up
        y = esp_kernels.swiglu(gate_up.view(1, 42), backend=backend)[0, place : place + 5]
        torch.testing.assert_close(y, torch.full((5,), expected), rtol=1e-6, atol=1e-35, equal_nan=True)


# PyTorch's own silu does not promise it: the vector body and the tail of a tensor may differ in the last bit.
@pytest.mark.parametrize("backend", ["cpp", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_neighbours(dtype, backend, rng):
    def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
        return esp_kernels.swiglu(gate_up, backend=backend)

    gate_up = torch.randn(3, 6, 3 * 142).to(dtype)[..., 71:-71]
    whole = swiglu(gate_up)
    assert torch.equal(swiglu(gate_up.contiguous()), whole)
    assert torch.equal(swiglu(strided(gate_up)), whole)
    assert torch.equal(swiglu(gate_up[:, ::2]), whole[:, ::2])
    assert torch.equal(swiglu(gate_up.mT.contiguous().mT.contiguous()), whole)
    four = gate_up.unflatten(1, (3, 2)).transpose(0, 2)
    assert torch.equal(swiglu(four), whole.unflatten(1, (3, 2)).transpose(0, 2))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert torch.equal(swiglu(gate_up), whole)
    finally:
        torch.set_num_threads(threads)
    for b in range(3):
        for r in range(6):
            assert torch.equal(swiglu(gate_up[b, r]), whole[b, r])


@pytest.mark.on_host
@pytest.mark.parametrize(
    ("gate_up", "sentence"),
    [
        (torch.zeros(3, 8).double(), "gate_up must be float32, bfloat16 or float16, got float64"),
        (torch.zeros(()), "gate_up must have at least 1 dimension, got 0"),
        (torch.zeros(3, 7), "gate_up must have an even last dimension, got 7"),
        (torch.zeros(8, 2).t(), "gate_up must have stride 1 in its last dimension, got strides [1, 2]"),
        ([1.0, 2.0], "gate_up must be a tensor, got list"),
    ],
)
def test_bad_input(gate_up, sentence, backend):
    with pytest.raises(ValueError) as error:
        esp_kernels.swiglu(gate_up, backend=backend)
    assert str(error.value) == sentence


def test_opcheck():
    torch.library.opcheck(torch.ops.esp_kernels.swiglu.default, (torch.randn(3, 16),))
    torch.library.opcheck(torch.ops.esp_kernels.swiglu.default, (torch.randn(2, 3, 8).bfloat16(),))
