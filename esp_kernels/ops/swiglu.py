"""The gated activation of a LLaMA MLP."""

import torch

from esp_kernels import _backend
from esp_kernels._check import check_float, check_rows, require


def swiglu(gate_up: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """y = silu(gate) * up, where gate is the first half of the last dimension and up the second.

    gate_up  [..., 2 n] float32, bfloat16 or float16; any stride but in the last dimension
    returns  [..., n] contiguous, gate_up's dtype; computed in float32 and rounded once

    silu(-inf) is 0. Raises ValueError on shapes, dtypes or strides that are not as above.
    """
    return _backend.select("swiglu", backend, gate_up, "gate_up")(gate_up)


def check(gate_up: torch.Tensor) -> None:
    check_float(gate_up, "gate_up")
    require(gate_up.dim() >= 1, "gate_up must have at least 1 dimension, got 0")
    n = gate_up.shape[-1]
    require(n % 2 == 0, f"gate_up must have an even last dimension, got {n}")
    check_rows(gate_up, "gate_up")
