"""tree_attention against scaled_dot_product_attention under a mask over prefix and block."""

import random

import pytest
import torch

import esp_kernels
from esp_kernels.testing import random_tree

MODELS = {"smollm2-135m": (9, 3, 64), "llama-3.1-8b": (32, 8, 128)}


@pytest.mark.parametrize("implementation", ["esp", "torch"])
@pytest.mark.parametrize("rows", [1, 16, 60])
@pytest.mark.parametrize("prefix", [128, 4096, 32768])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_tree_attention(benchmark, model, dtype, prefix, rows, implementation):
    heads, kv_heads, dim = MODELS[model]
    slots = prefix + rows
    q = torch.randn(1, rows, heads, dim).to(dtype)
    k, v = (torch.empty(1, slots, kv_heads, dim, dtype=dtype).normal_() for _ in range(2))
    parent = torch.tensor([random_tree(rows, random.Random(0))], dtype=torch.int32)
    depth, ancestors = esp_kernels.tree_metadata(parent)
    prefix_len = torch.tensor([prefix], dtype=torch.int32)

    def esp() -> torch.Tensor:
        return esp_kernels.tree_attention(q, k, v, prefix_len, ancestors, depth)[0]

    named = (ancestors[0] >> torch.arange(rows) & 1).bool()
    mask = torch.cat([torch.ones(rows, prefix, dtype=torch.bool), named], 1)

    def peer() -> torch.Tensor:
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(*(x.transpose(1, 2) for x in (q, k, v)), mask, enable_gqa=True)

    benchmark.pedantic(esp if implementation == "esp" else peer, rounds=10, warmup_rounds=2)
    seconds = benchmark.stats.stats.median
    moved = (k.numel() + v.numel() + 2 * q.numel()) * q.element_size()
    pairs = heads * (rows * prefix + int(depth.sum()) + rows)
    benchmark.extra_info |= {
        "bytes": moved,
        "GB/s": round(moved / seconds / 1e9, 2),
        "GFLOP/s": round(4 * dim * pairs / seconds / 1e9, 1),
    }
