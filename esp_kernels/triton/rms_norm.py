import torch
import triton
import triton.language as tl

from esp_kernels.triton._rows import as_rows, pairwise_sum


# Bytes: x and y once, the residual twice; the weight once a program.
@triton.jit(do_not_specialize=["rows", "inner"])
def _rms_norm_kernel(
    x, weight, residual, y, rows, inner, outer_stride, inner_stride, eps,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    n = tl.arange(0, BLOCK_N)
    inside = (row < rows)[:, None] & (n < N)[None, :]
    start = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    at = row.to(tl.int64)[:, None] * N + n[None, :]

    h = tl.load(x + start[:, None] + n[None, :], mask=inside, other=0.0)
    if residual is not None:
        h = (h.to(tl.float32) + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(h.dtype)
        tl.store(residual + at, h, mask=inside)
    wide = h.to(tl.float32)
    scale = tl.rsqrt(pairwise_sum(wide * wide) / N + eps)
    gain = tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y + at, (wide * scale[:, None] * gain[None, :]).to(h.dtype), mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    y = x.new_empty(x.shape)
    if y.numel() == 0:
        return y
    x = as_rows(x)
    outer, inner, n = x.shape
    block = triton.next_power_of_2(n)
    block_rows = max(1, 1024 // block)
    warps = min(max(block // 512, 4), 8)
    # Unfused, so that a square is rounded before it is added whichever way the sum is compiled.
    _rms_norm_kernel[triton.cdiv(outer * inner, block_rows),](
        x, weight, residual, y, outer * inner, inner, x.stride(0), x.stride(1), eps,
        N=n, BLOCK_N=block, BLOCK_ROWS=block_rows, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return y
