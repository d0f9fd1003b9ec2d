import torch
import triton
import triton.language as tl

from esp_kernels.triton._rows import as_rows

BLOCK = 1024
LOG2_E = tl.constexpr(1.4426950408889634)
LN2_HIGH = tl.constexpr(0.693359375)  # 9 bits: its multiples by whole numbers up to 185 are exact
LN2_LOW = tl.constexpr(-2.12194440e-4)


@triton.jit
def _exp(x):
    """exp(x) to a few float32 ulp; exp2(x * LOG2_E) alone would lose six bits where x is large."""
    whole = tl.floor(x * LOG2_E + 0.5)
    rest = x - whole * LN2_HIGH - whole * LN2_LOW
    return tl.exp2(rest * LOG2_E) * tl.exp2(whole)


# Bytes: gate, up and y once.
@triton.jit(do_not_specialize=["inner"])
def _swiglu_kernel(gate_up, y, n, inner, outer_stride, inner_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    gate = tl.load(gate_up + start + at, mask=at < n, other=0.0).to(tl.float32)
    up = tl.load(gate_up + start + n + at, mask=at < n, other=0.0).to(tl.float32)

    # Beyond 128 exp(-gate) is 0 or infinite anyway. NaN passes: no comparison holds for it.
    gate = tl.where(gate < -128.0, -128.0, gate)
    power = _exp(-tl.where(gate > 128.0, 128.0, gate))
    tl.store(y + row.to(tl.int64) * n + at, (gate / (1.0 + power) * up).to(y.dtype.element_ty), mask=at < n)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    n = gate_up.shape[-1] // 2
    y = gate_up.new_empty((*gate_up.shape[:-1], n))
    if y.numel() == 0:
        return y
    gate_up = as_rows(gate_up)
    outer, inner, _ = gate_up.shape
    _swiglu_kernel[outer * inner, triton.cdiv(n, BLOCK)](
        gate_up, y, n, inner, gate_up.stride(0), gate_up.stride(1), BLOCK=BLOCK, enable_fp_fusion=False
    )
    return y
