"""What kernels over rows share."""

import torch
import triton
import triton.language as tl


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., n] as [outer, inner, n]. A copy only where the leading dimensions do not collapse into one."""
    return x[(None,) * (3 - x.dim())] if x.dim() <= 3 else x.flatten(0, -3)


@triton.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@triton.jit
def pairwise_sum(x):
    """The sum over the last dimension of x [M, N], N a power of two, in an order that does not depend on how
    the compiler lays x out over threads: halves until they have 2048 elements, then neighbours."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    for level in tl.static_range(1, _log2(N) + 1):
        if N >> level >= 2048:
            x = tl.sum(tl.reshape(x, [M, 2, N >> level]), 1)
        else:
            x = tl.sum(tl.reshape(x, [M, x.shape[1] // 2, 2]), 2)
    return tl.reshape(x, [M])
