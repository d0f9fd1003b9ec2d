"""A linear layer whose rows do not depend on how many there are."""

import torch

from esp_kernels import _backend
from esp_kernels._check import (
    ANY,
    check_contiguous,
    check_device,
    check_dtype,
    check_float,
    check_rows,
    check_shape,
    require,
)

PANEL = 32


def pack_linear(weight: torch.Tensor) -> torch.Tensor:
    """A [N, K] weight in the order in which `linear_rows` reads it: panels of 32 outputs, the last one padded
    with zeros. Run it once, when the weights are loaded.

    weight    [N, K], N and K at least 1, float32, bfloat16 or float16; any strides
    returns   float32, float16: [ceil(N / 32), K, 32], so that output n of k is [n // 32, k, n % 32]
              bfloat16: [ceil(N / 32), ceil(K / 2), 32, 2], so that it is [n // 32, k // 2, n % 32, k % 2],
              with zeros after an odd K: the pairs are what dot product and tile instructions take
              contiguous, on the weight's device

    Raises ValueError on shapes or dtypes that are not as above.
    """
    require(isinstance(weight, torch.Tensor), f"weight must be a tensor, got {type(weight).__name__}")
    check_float(weight, "weight")
    check_shape(weight, "weight", ANY, ANY)
    require(weight.numel() > 0, f"weight must not be empty, got shape {list(weight.shape)}")
    n, k = weight.shape
    pair = 2 if weight.dtype == torch.bfloat16 else 1
    padded = torch.nn.functional.pad(weight.detach(), (0, -k % pair, 0, -n % PANEL))
    if pair == 1:
        return padded.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
    return padded.unflatten(1, (-1, pair)).unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()


def linear_rows(
    x: torch.Tensor,
    packed_weight: torch.Tensor,
    out_features: int,
    bias: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """y = x W^T + bias, for a few rows (memory bound) as well as for hundreds (compute bound).

    x              [..., K], float32, bfloat16 or float16; any stride but in the last dimension
    packed_weight  W [N, K] as `pack_linear` packs it, x's dtype
    out_features   N
    bias           [N] contiguous, x's dtype
    returns        [..., N] contiguous, x's dtype; summed in float32, the bias last, and rounded once

    Every output is summed in an order that depends on K alone: a row's bits do not depend on the other rows,
    on their number, on strides or on threads. Raises ValueError on shapes, dtypes, devices or strides that
    are not as above.
    """
    return _backend.select("linear_rows", backend, x, "x")(x, packed_weight, out_features, bias)


def check(
    x: torch.Tensor, packed_weight: torch.Tensor, out_features: int, bias: torch.Tensor | None = None
) -> None:
    check_float(x, "x")
    require(x.dim() >= 1, "x must have at least 1 dimension, got 0")
    require(x.shape[-1] >= 1, "x must have at least 1 element in its last dimension, got 0")
    check_rows(x, "x")
    require(out_features >= 1, f"out_features must be at least 1, got {out_features}")
    k, panels = x.shape[-1], -(-out_features // PANEL)
    check_device(packed_weight, "packed_weight", x)
    check_dtype(packed_weight, "packed_weight", x.dtype)
    shape = (panels, (k + 1) // 2, PANEL, 2) if x.dtype == torch.bfloat16 else (panels, k, PANEL)
    check_shape(packed_weight, "packed_weight", *shape)
    check_contiguous(packed_weight, "packed_weight")
    if bias is not None:
        check_device(bias, "bias", x)
        check_dtype(bias, "bias", x.dtype)
        check_shape(bias, "bias", out_features)
        check_contiguous(bias, "bias")
