"""A decode call of the demo model: plain against blocks of 10 to 60 rows, on the same prefix.

The ratio to the plain step is what a block costs; tau must be above it for drafts to pay.
"""

import pytest
import torch

from esp_decode import Decoder
from esp_decode.drafters import DraftOptions
from esp_decode.loop import new_state, prefill, step

PREFIX = 256


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return Decoder.from_pretrained("smollm2", dtype=request.param, device="cpu")


@pytest.mark.parametrize("budget", [1, 10, 16, 30, 60])
def test_step(benchmark, decoder, budget):
    options = DraftOptions.check("cpu", drafter="ar" if budget == 1 else "esp", budget=max(budget, 4))
    model = decoder.model
    prompt = torch.randint(0, model.vocab_size, (1, PREFIX), dtype=torch.int32)
    drafter = options.drafter_for(model)
    rounds = 30
    state = new_state(model, drafter, 1, PREFIX + (rounds + 7) * drafter.rows)
    prefill(model, drafter, prompt, state)
    benchmark.pedantic(step, (model, drafter, state), rounds=rounds, warmup_rounds=5)
    weights = sum(p.numel() * p.element_size() for p in _weights(model))
    benchmark.extra_info |= {
        "rows": drafter.rows,
        "weight bytes": weights,
        "GB/s": round(weights / benchmark.stats.stats.median / 1e9, 2),
    }


def _weights(model) -> list[torch.Tensor]:
    linear = [getattr(layer, name) for layer in model.layers for name in ("qkv", "output", "gate_up", "down")]
    return [one.weight for one in [*linear, model.lm_head]]
