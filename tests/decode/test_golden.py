"""The demo model against outputs and decode calls from an independent replay (tests/data/README.md)."""

import os

import pytest
import torch

from esp_decode.loop import new_state, prefill

from .conftest import golden

CASES = golden()
PROBES = {
    "vocab-mean": {"probe": "vocab-mean"},
    "prompt-mean, lambda 0": {"probe": "prompt-mean", "lam": 0.0},
    "prompt-mean, lambda 0.1": {"probe": "prompt-mean", "lam": 0.1},
}
TREES = ["4", "14", "29", "7,2", "15,4", "7,5,3"]
GRID = [(p, t) for p in PROBES for t in TREES]
ALL = (
    os.environ.get("ESP_GOLDEN") == "all"
)  # every prompt, probe and tree; else one prompt a tree, all different
CHOSEN = GRID if ALL else [(list(PROBES)[i % 3], tree) for i, tree in enumerate(TREES)]


@pytest.mark.parametrize(("probe", "tree"), CHOSEN)
def test_outputs_and_decode_calls(probe, tree, smollm2):
    decoder = smollm2.with_drafter(
        "esp", tree=f"static:{tree}", masks=tree.count(",") + 1, prune=False, **PROBES[probe]
    )
    for index in range(len(CASES)) if ALL else [TREES.index(tree)]:
        case = CASES[index]
        result = decoder.generate(case["prompt_ids"], max_new_tokens=100)
        assert result.output_ids == case["output_ids"], index
        assert result.decode_calls == case["decode_calls"][probe][tree], index


def test_plain_decoding_of_every_prompt_starts_right(smollm2):
    """The first tokens; whole outputs are covered above."""
    plain = smollm2.with_drafter("ar")
    for case in CASES if ALL else CASES[len(TREES) :: 3]:
        result = plain.generate(case["prompt_ids"], max_new_tokens=8)
        assert result.output_ids == case["output_ids"][:8]
        assert result.decode_calls == len(result.output_ids) - 1


def test_the_masks_behind_the_prompt_guess_the_same_tokens(smollm2):
    """Logits of mask rows, not only their consequences: the five best of each of three masks."""
    model = smollm2.model
    options = smollm2.with_drafter("esp", tree="static:7,5,3", masks=3, probe="vocab-mean").options
    drafter = options.drafter_for(model)
    for case in CASES[::5]:
        prompt = torch.tensor([case["prompt_ids"]], dtype=torch.int32)
        state = new_state(model, drafter, 1, prompt.shape[1] + drafter.rows)
        prefill(model, drafter, prompt, state)
        block = state.draft.block
        logits = model.lm_head(model.forward(block, state.draft.probe, state.cache))
        masks = logits[0, block.mask_ordinal[0] > 0]
        assert masks.topk(5).indices.tolist() == case["first_mask_top5"]
