"""Every op but linear_rows at the sizes of a model, on the backend that `auto` takes."""

import pytest
import torch

from bench import cases
from bench.cases import Size


@pytest.mark.parametrize("rows", [1, 10, 60])
@pytest.mark.parametrize("model", ["smollm2", "llama-3.1-8b"])
@pytest.mark.parametrize("op", cases.OPS)
def test_op(benchmark, op, model, rows):
    torch.manual_seed(0)
    size = Size.of(model, rows, prefix=1024)
    benchmark.pedantic(cases.OPS[op](size, "auto"), rounds=20, warmup_rounds=3)
    moved, flops = size.cost(op)
    seconds = benchmark.stats.stats.median
    benchmark.extra_info |= {
        "bytes": moved,
        "GB/s": round(moved / seconds / 1e9, 2),
        "GFLOP/s": round(flops / seconds / 1e9, 1),
    }
