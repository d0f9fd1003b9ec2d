"""topk_logprobs against torch.topk and torch.logsumexp."""

import pytest
import torch

import esp_kernels


def peer(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = logits.float().topk(k)
    return values - logits.float().logsumexp(-1, keepdim=True), ids.int()


@pytest.mark.parametrize("implementation", ["esp", "torch"])
@pytest.mark.parametrize("k", [1, 8, 64])
@pytest.mark.parametrize("rows", [1, 16, 60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_topk_logprobs(benchmark, dtype, rows, k, implementation):
    logits = (torch.randn(rows, 49152) * 3).to(dtype)
    run = esp_kernels.topk_logprobs if implementation == "esp" else peer
    benchmark.pedantic(run, args=(logits, k), rounds=20, warmup_rounds=3)
    seconds = benchmark.stats.stats.median
    moved = logits.numel() * logits.element_size() + rows * k * 8
    # A subtraction, an exponential of 17 operations and an addition.
    flops = 19 * logits.numel()
    benchmark.extra_info |= {
        "bytes": moved,
        "GB/s": round(moved / seconds / 1e9, 2),
        "GFLOP/s": round(flops / seconds / 1e9, 1),
    }
