import pytest
import torch

import esp_kernels
from esp_kernels.testing import assert_as_accurate, strided

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1,), (7, 63), (2, 5, 65), (2, 3, 9, 64), (1, 111, 576), (2, 16384), (0, 64)]
)
def test_matches_float64(shape, dtype, backend, rng):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    y = esp_kernels.rms_norm(x, weight, 1e-5, backend=backend)
    assert y.dtype == dtype and y.is_contiguous()
    baseline = torch.nn.functional.rms_norm(x, shape[-1:], weight, 1e-5)
    assert_as_accurate(y, exact(x, weight, 1e-5), baseline)


@pytest.mark.parametrize("dtype", DTYPES)
def test_adds_the_residual_in_place(dtype, backend, rng):
    x, residual, weight = (
        torch.randn(4, 96).to(dtype),
        torch.randn(4, 96).to(dtype),
        torch.randn(96).to(dtype),
    )
    total = x + residual
    y = esp_kernels.rms_norm(x, weight, 1e-5, residual, backend=backend)
    assert torch.equal(residual, total)
    assert torch.equal(y, esp_kernels.rms_norm(total, weight, 1e-5, backend=backend))


def test_per_head_view_of_a_fused_projection(backend, rng):
    heads = torch.randn(2, 5, 12 * 64)[..., 64 : 9 * 64].unflatten(-1, (8, 64))
    weight = torch.randn(64)
    assert not heads.is_contiguous()
    y = esp_kernels.rms_norm(heads, weight, backend=backend)
    assert torch.equal(y, esp_kernels.rms_norm(heads.contiguous(), weight, backend=backend))
    assert torch.equal(esp_kernels.rms_norm(strided(heads), weight, backend=backend), y)


@pytest.mark.parametrize("n", [128, 576, 4097])
def test_a_row_does_not_depend_on_its_neighbours(n, backend, rng):
    x, weight = torch.randn(17, n), torch.randn(n)
    block = esp_kernels.rms_norm(x, weight, backend=backend)
    order = torch.randperm(17)
    assert torch.equal(esp_kernels.rms_norm(x[order], weight, backend=backend), block[order])
    for r in range(17):
        assert torch.equal(esp_kernels.rms_norm(x[r : r + 1], weight, backend=backend)[0], block[r])


@pytest.mark.on_host
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"x": torch.zeros(3, 8, dtype=torch.float64)},
            "x must be float32, bfloat16 or float16, got float64",
        ),
        ({"x": torch.zeros(1, 1, 1, 3, 8)}, "x must have 1 to 4 dimensions, got 5"),
        ({"x": torch.zeros(8, 3).t()}, "x must have stride 1 in its last dimension, got strides [1, 3]"),
        ({"weight": torch.zeros(7)}, "weight must have shape [8], got [7]"),
        ({"weight": torch.zeros(8).bfloat16()}, "weight must be float32, got bfloat16"),
        ({"eps": -1.0}, "eps must be at least 0, got -1"),
        ({"residual": torch.zeros(2, 8)}, "residual must have shape [3, 8], got [2, 8]"),
        ({"x": "text"}, "x must be a tensor, got str"),
    ],
)
def test_bad_input(change, sentence, backend):
    arguments = {"x": torch.zeros(3, 8), "weight": torch.zeros(8), "eps": 1e-6, "residual": None} | change
    with pytest.raises(ValueError) as error:
        esp_kernels.rms_norm(**arguments, backend=backend)
    assert str(error.value) == sentence


def test_devices_must_agree():
    with pytest.raises(ValueError, match=r"^weight must be on cpu, got meta$"):
        esp_kernels.rms_norm(torch.zeros(3, 8), torch.zeros(8, device="meta"), backend="ref")


def test_opcheck():
    x, weight = torch.randn(3, 8), torch.randn(8)
    torch.library.opcheck(torch.ops.esp_kernels.rms_norm.default, (x, weight, 1e-6, None))
    torch.library.opcheck(torch.ops.esp_kernels.rms_norm.default, (x, weight, 1e-6, torch.randn(3, 8)))
