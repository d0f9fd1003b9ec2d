import pytest
import torch
import triton
import triton.language as tl
from triton.language import standard

from esp_kernels import _backend

from . import repairs

pytestmark = pytest.mark.skipif(not _backend.interpreting(), reason="kernels run natively on this machine")


@triton.jit
def _sort_kernel(x, ascending, descending, best, flipped, N: tl.constexpr, K: tl.constexpr):
    n, k = tl.arange(0, N), tl.arange(0, K)
    values = tl.load(x + n)
    tl.store(ascending + n, tl.sort(values))
    tl.store(descending + n, tl.sort(values, descending=True))
    tl.store(best + k, tl.topk(values, K))
    tl.store(flipped + n, tl.flip(values, 0))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sorts_as_tritons_own_network(dtype, rng, monkeypatch):
    x = torch.randint(-(2**31), 2**31, (16,)).to(dtype)
    results = []
    for network in (repairs.sort_impl, repairs.sorting_network):
        monkeypatch.setattr(standard, "sort_impl", network)
        results.append([torch.empty_like(x) for _ in range(2)] + [x[:4].clone(), torch.empty_like(x)])
        _sort_kernel[1,](x, *results[-1], N=16, K=4)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(results[0][0], x.sort().values) and torch.equal(results[0][3], x.flip(0))
