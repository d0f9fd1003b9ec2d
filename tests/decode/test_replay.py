"""Teacher-forced replay gives the steps that decoding takes."""

import os

import pytest
import torch

import esp_kernels
from esp_decode.calibrate.fit import fit, joined_calls
from esp_decode.calibrate.replay import replay
from esp_decode.calibrate.simulate import esp_steps, walk
from esp_decode.loop import new_state, prefill
from esp_decode.probe import Probe
from esp_decode.ratios import ratio
from esp_decode.sources import default_sources
from esp_decode.tree import TreeShape

from .conftest import golden, ids_decoder
from .test_golden import PROBES, TREES

CASES = golden() if os.environ.get("ESP_GOLDEN") == "all" else golden()[3:4]


@pytest.mark.parametrize("name", PROBES)
def test_golden_decode_calls(name, smollm2):
    """Those of real decoding: tests/decode/test_golden.py holds it to the same file."""
    probe = Probe.parse(PROBES[name]["probe"], PROBES[name].get("lam"))
    for case in CASES:
        heard = replay(smollm2.model, case["prompt_ids"], case["output_ids"], probe, 3, 32)
        assert heard.ids[:, 0].tolist() == case["output_ids"], "the model's own tokens"
        for tree in TREES:
            shape = TreeShape.parse(f"static:{tree}", None, tree.count(",") + 1, 60)
            calls = len(list(esp_steps(heard, shape, prune=False)))
            assert calls == case["decode_calls"][name][tree], tree


@pytest.mark.parametrize("kind", ["qwen3", "mistral-window"])
@pytest.mark.parametrize("probe", ["prompt-mean", "vocab-mean", "last-k"])
@pytest.mark.parametrize(("tree", "masks"), [("dynamic", 1), ("dynamic", 3), ("static:4,2", 2)])
def test_steps_of_drafter_esp(kind, probe, tree, masks, tiny_folder):
    prompt = torch.randint(1, 128, (37,), generator=torch.Generator().manual_seed(1)).tolist()
    decoder = ids_decoder(tiny_folder(kind), tree=tree, masks=masks, budget=24, probe=probe)
    said = decoder.generate(prompt, max_new_tokens=60)
    shape = decoder.options.shape
    heard = replay(decoder.model, prompt, said.output_ids, decoder.options.probe, masks, shape.widest + 1)
    steps = list(esp_steps(heard, shape, prune=True))
    assert sum(steps) == said.new_tokens - 1
    assert len(steps) == said.decode_calls


def test_steps_of_drafter_joined(tiny_folder):
    """Where no draft is wrong, nothing is heard in decoding that replay does not hear."""
    prompt = torch.randint(1, 128, (37,), generator=torch.Generator().manual_seed(1)).tolist()
    decoder = ids_decoder(tiny_folder("tied"), drafter="joined", budget=30)
    said = decoder.generate(prompt, max_new_tokens=80)
    heard = replay(decoder.model, prompt, said.output_ids, decoder.options.probe, 3, 32)
    sources = default_sources(torch.device("cpu"))
    [(tokens, calls)] = joined_calls(sources, [heard], 30)
    assert tokens == said.new_tokens - 1
    assert said.decode_calls <= calls < tokens


def test_replay_says_what_decoding_hears(tiny_folder):
    """Bit for bit, from one forward for all positions."""
    prompt = torch.randint(1, 128, (21,), generator=torch.Generator().manual_seed(2)).tolist()
    decoder = ids_decoder(tiny_folder("qwen3"), budget=6, masks=2, probe="vocab-mean")
    model, drafter = decoder.model, decoder.options.drafter_for(decoder.model)
    said = decoder.generate(prompt, max_new_tokens=12)
    heard = replay(model, prompt, said.output_ids, decoder.options.probe, 2, 5)
    for position in (0, 5, 10):
        sequence = torch.tensor([prompt + said.output_ids[:position]], dtype=torch.int32)
        state = new_state(model, drafter, 1, 64)
        prefill(model, drafter, sequence, state)
        block = state.draft.block
        hidden = model.forward(block, state.draft.probe, state.cache)
        logprobs, ids = esp_kernels.topk_logprobs(model.lm_head(hidden), 5)
        assert torch.equal(ids[0, 0], heard.ids[position])
        assert torch.equal(logprobs[block.mask_ordinal > 0], heard.mask_logprobs[position, 0])


def test_fitting_does_no_harm_and_learns(tiny_folder):
    prompt = torch.randint(1, 128, (37,), generator=torch.Generator().manual_seed(1)).tolist()
    decoder = ids_decoder(tiny_folder("tied"), drafter="joined", budget=30)
    said = decoder.generate(prompt, max_new_tokens=80)
    heard = replay(decoder.model, prompt, said.output_ids, decoder.options.probe, 3, 32)
    before = default_sources(torch.device("cpu"))
    after = fit(before, [heard] * 3, lambda done, total: None)
    assert ratio(joined_calls(after, [heard], 30)) >= ratio(joined_calls(before, [heard], 30))
    assert not torch.equal(after.weights, before.weights)
    assert torch.equal(before.weights, default_sources(torch.device("cpu")).weights), "not in place"


def test_walk_follows_tokens_and_no_masks():
    tokens, parent = [7, 3, 4, 5, 3], [-1, 0, 0, 2, 1]
    assert walk(tokens, parent, [4, 5, 9]) == [0, 2, 3]
    assert walk(tokens, parent, [3, 3, 3]) == [0, 1, 4]
    assert walk(tokens, parent, [8]) == [0]
