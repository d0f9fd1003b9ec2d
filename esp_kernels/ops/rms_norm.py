"""RMS normalisation with the residual addition fused in."""

import torch

from esp_kernels import _backend
from esp_kernels._check import (
    check_contiguous,
    check_device,
    check_dtype,
    check_float,
    check_rows,
    check_shape,
    require,
)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """y = h / sqrt(mean(h^2) + eps) * weight over the last dimension, with h = x + residual.

    x         [..., n], 1 to 4 dimensions, float32, bfloat16 or float16; any stride but in the last dimension
    weight    [n], x's dtype
    residual  [..., n] contiguous, x's dtype; x is added to it IN PLACE (rounded to its dtype)
    returns   [..., n] contiguous, x's dtype; the sum is taken in float32 and rounded once

    A [B, T, H, D] x with a [D] weight is the per-head q/k norm of Qwen3. A row's result does not depend on
    the other rows. Raises ValueError on shapes, dtypes, devices or strides that are not as above.
    """
    return _backend.select("rms_norm", backend, x, "x")(x, weight, eps, residual)


def check(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> None:
    check_float(x, "x")
    require(1 <= x.dim() <= 4, f"x must have 1 to 4 dimensions, got {x.dim()}")
    check_rows(x, "x")
    check_device(weight, "weight", x)
    check_dtype(weight, "weight", x.dtype)
    check_shape(weight, "weight", x.shape[-1])
    check_contiguous(weight, "weight")
    require(eps >= 0, f"eps must be at least 0, got {eps:g}")
    if residual is not None:
        check_device(residual, "residual", x)
        check_dtype(residual, "residual", x.dtype)
        check_shape(residual, "residual", *x.shape)
        check_contiguous(residual, "residual")
