"""linear_rows against F.linear, at the sizes of a small model, with weights that no cache holds."""

import itertools

import pytest
import torch

import esp_kernels

SIZES = [(576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152)]
COLD_BYTES = 2**28


@pytest.mark.parametrize("implementation", ["esp", "torch"])
@pytest.mark.parametrize("rows", [1, 4, 16, 60, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("k", "n"), SIZES)
def test_linear_rows(benchmark, k, n, dtype, rows, implementation):
    x, weight = torch.randn(rows, k).to(dtype), torch.randn(n, k).to(dtype)
    size = weight.numel() * weight.element_size()
    source = esp_kernels.pack_linear(weight) if implementation == "esp" else weight
    weights = itertools.cycle([source.clone() for _ in range(max(2, COLD_BYTES // size))])

    def esp() -> torch.Tensor:
        return esp_kernels.linear_rows(x, next(weights), n)

    def peer() -> torch.Tensor:
        return torch.nn.functional.linear(x, next(weights))

    benchmark.pedantic(esp if implementation == "esp" else peer, rounds=20, warmup_rounds=3)
    seconds = benchmark.stats.stats.median
    moved = size + (x.numel() + rows * n) * x.element_size()
    benchmark.extra_info |= {
        "bytes": moved,
        "GB/s": round(moved / seconds / 1e9, 2),
        "GFLOP/s": round(2 * rows * k * n / seconds / 1e9, 1),
    }


def test_read_bandwidth(benchmark):
    """The roof of few rows: one pass over what no cache holds."""
    data = torch.ones(COLD_BYTES // 4)
    benchmark.pedantic(data.sum, rounds=10, warmup_rounds=1)
    benchmark.extra_info |= {
        "bytes": COLD_BYTES,
        "GB/s": round(COLD_BYTES / benchmark.stats.stats.median / 1e9, 2),
    }
