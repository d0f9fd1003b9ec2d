"""The step-time curve: what a forward costs on this machine by its rows."""

import statistics
import time

import torch

import esp_kernels
from esp_decode.model import Model
from esp_decode.tree import chain_block

ROWS = (1, 2, 4, 8, 16, 32, 64)
PREFIX = 256
ROUNDS = 7


@torch.inference_mode()
def step_seconds(model: Model) -> dict[int, float]:
    """The median seconds of a forward, LM head and top-k, by rows; sizes take turns, since machines drift."""
    cache = model.new_cache(1, PREFIX + max(ROWS))
    no_probe = torch.empty((1, 0, model.embedding.shape[1]), device=model.device)
    cache.k.zero_()
    cache.v.zero_()
    cache.prefix_len.fill_(PREFIX)
    seconds: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(ROUNDS + 1):
        for rows in ROWS:
            block = chain_block(torch.zeros((1, rows), dtype=torch.int32, device=model.device), rows)
            started = time.perf_counter()
            logprobs, _ = esp_kernels.topk_logprobs(model.lm_head(model.forward(block, no_probe, cache)), 1)
            logprobs.cpu()
            seconds[rows].append(time.perf_counter() - started)
    return {rows: statistics.median(times[1:]) for rows, times in seconds.items()}


def worth(seconds: dict[int, float], tau_by_budget: dict[int, float]) -> float:
    """The tokens that a row must be expected to commit to be worth its time: what the time of a row buys
    where the budget is chosen best."""
    fewest, most = min(seconds), max(seconds)
    row = max(0.0, (seconds[most] - seconds[fewest]) / (most - fewest))
    best = max(tau / _between(seconds, budget) for budget, tau in tau_by_budget.items())
    return row * best


def _between(seconds: dict[int, float], rows: int) -> float:
    low = max((r for r in seconds if r <= rows), default=min(seconds))
    high = min((r for r in seconds if r >= rows), default=max(seconds))
    if low == high:
        return seconds[low]
    return seconds[low] + (seconds[high] - seconds[low]) * (rows - low) / (high - low)
