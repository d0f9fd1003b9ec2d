"""A decode call of the demo model: plain against blocks of 10 to 60 rows, on the same prefix.

The ratio to the plain step is what a block costs; tau must be above it for drafts to pay.
"""

import pytest
import torch

from esp_decode import Decoder
from esp_decode.decoder import DraftOptions
from esp_decode.loop import prefill
from esp_decode.verify import verify

PREFIX = 256


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return Decoder.from_pretrained("smollm2", dtype=request.param, device="cpu")


@pytest.mark.parametrize("budget", [1, 10, 16, 30, 60])
def test_step(benchmark, decoder, budget):
    options = DraftOptions.check("cpu", drafter="ar" if budget == 1 else "esp", budget=max(budget, 4))
    model = decoder.model
    prompt = torch.randint(0, model.vocab_size, (1, PREFIX), dtype=torch.int32)
    drafter = options.drafter_for(model, prompt)
    cache = model.new_cache(1, PREFIX + 2 * drafter.rows)
    first, mask_logits = prefill(model, drafter, prompt, cache)
    block = drafter.draft(first, first[:, None], mask_logits)

    def step() -> None:
        """Everything of a step but the commit, so that every round runs on the same prefix."""
        verdict = verify(block, model.lm_head(model.forward(block, drafter.probe, cache)))
        drafter.draft(verdict.bonus, verdict.committed, mask_logits)

    benchmark.pedantic(step, rounds=30, warmup_rounds=5)
    weights = sum(p.numel() * p.element_size() for p in _weights(model))
    benchmark.extra_info |= {
        "rows": block.tokens.shape[1],
        "weight bytes": weights,
        "GB/s": round(weights / benchmark.stats.stats.median / 1e9, 2),
    }


def _weights(model) -> list[torch.Tensor]:
    linear = [getattr(layer, name) for layer in model.layers for name in ("qkv", "output", "gate_up", "down")]
    return [one.weight for one in [*linear, model.lm_head]]
