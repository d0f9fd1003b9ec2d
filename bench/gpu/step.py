"""The captured decode step of a random model of Llama-3.1-8B's sizes: blocks of several budgets against plain
decoding, and what of a step lies outside of the big products."""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch

from bench.gpu.bits import drafter
from bench.gpu.random_model import random_model
from bench.gpu.timing import captured, median_seconds
from esp_decode.drafters.options import GPU_ROWS
from esp_decode.graph import StepGraph
from esp_decode.loop import new_state, prefill, step, tensors_of
from esp_decode.model import Model
from esp_decode.roofline import MODELS

PREFIX = 1024
BUDGETS = (1, 10, 30, 60, 120)
STEPS, GROUPS = 20, 5


def step_seconds(model: Model, budget: int, rows: int) -> float:
    """Of a step as the host sees it, tokens read: the median of groups of steps."""
    one = drafter(model, budget, rows)
    prompt = torch.randint(model.vocab_size, (1, PREFIX), dtype=torch.int32, device=model.device)
    state = new_state(model, one, 1, PREFIX + (STEPS * (GROUPS + 1) + 3) * (budget + 1) + 2 * rows)
    prefill(model, one, prompt, state)
    replays = StepGraph(lambda: step(model, one, state).committed, tensors_of(state)).replays()
    groups = []
    for _ in range(GROUPS + 1):
        started = time.perf_counter()
        for committed in islice(replays, STEPS):
            committed.tolist()
        groups.append((time.perf_counter() - started) / STEPS)
    return statistics.median(groups[1:])


def product_seconds(model: Model, rows: int) -> float:
    """Of all linear layers of a step, one behind the other."""
    some = {
        width: torch.randn(1, rows, width, device=model.device).to(model.dtype)
        for width in {one.weight.shape[1] for one in products(model)}
    }

    def run() -> None:
        for one in products(model):
            one(some[one.weight.shape[1]])

    return median_seconds(captured(run, 1).replay)


def products(model: Model) -> Iterator:
    for layer in model.layers:
        yield from (layer.qkv, layer.output, layer.gate_up, layer.down)
    yield model.lm_head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b", help="whose sizes")
    options = parser.parse_args()
    model = random_model(MODELS[options.model], torch.bfloat16, "cuda", context=1 << 16)
    plain = None
    with options.out.open("w") as file:
        for budget in BUDGETS:
            rows = next(size for size in GPU_ROWS if size >= budget)
            seconds, within = step_seconds(model, budget, rows), product_seconds(model, rows)
            plain = plain or seconds
            row = {"model": options.model, "prefix": PREFIX, "budget": budget, "rows": rows}
            row |= {
                "us": seconds * 1e6,
                "over_plain": seconds / plain,
                "outside_products": 1 - within / seconds,
            }
            print(json.dumps(row), file=file, flush=True)
            print(
                f"budget {budget:3} in {rows:3} rows: {row['us']:8.1f} us a step, {row['over_plain']:.3f} x "
                f"plain, {row['outside_products']:.1%} outside of the products",
                flush=True,
            )


if __name__ == "__main__":
    main()
