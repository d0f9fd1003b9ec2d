"""Tree decoding equals plain decoding bit for bit, and transformers' greedy decoding token for token."""

import os

import pytest
import torch

from .conftest import TINY, golden, ids_decoder

DRAFTS = [
    {"tree": "dynamic", "masks": 1, "budget": 10},
    {"tree": "dynamic", "masks": 2, "budget": 30},
    {"tree": "dynamic", "masks": 3, "budget": 60},
    {"tree": "static:4", "masks": 1},
    {"tree": "static:7,2", "masks": 2, "prune": False},
    {"tree": "static:7,5,3", "masks": 3},
    {"tree": "static:1", "masks": 1},
    {"tree": "static:1,1,1", "masks": 3},
]


def prompt(length: int) -> list[int]:
    return torch.randint(1, 128, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def transformers_greedy(folder, prompt_ids: list[int], new_tokens: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt_ids])
    out = model.to(ids.device).generate(ids, max_new_tokens=new_tokens, do_sample=False)
    return out[0, len(prompt_ids) :].tolist()


@pytest.mark.on_device
@pytest.mark.parametrize("kind", TINY)
@pytest.mark.parametrize("length", [1, 70])
def test_every_family_equals_transformers(kind, length, tiny_folder):
    """70 tokens are more than the windows of 24 hold."""
    folder, ids = tiny_folder(kind), prompt(length)
    expected = transformers_greedy(folder, ids, 48)
    plain = ids_decoder(folder, drafter="ar").generate(ids, max_new_tokens=48)
    assert plain.output_ids == expected
    for options in DRAFTS:
        result = ids_decoder(folder, **options).generate(ids, max_new_tokens=48)
        assert result.output_ids == expected, options
        assert result.decode_calls <= plain.decode_calls


@pytest.mark.on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("probe", ["prompt-mean", "vocab-mean", "last-k", "sample"])
def test_every_dtype_and_probe_equals_plain_decoding(dtype, probe, tiny_folder):
    folder, ids = tiny_folder("qwen3"), prompt(33)
    plain: dict[int, list[int]] = {}  # by the rows of a block: on a GPU, equal products give equal bits
    for options in DRAFTS:
        decoder = ids_decoder(folder, dtype, probe=probe, **options)
        beside = decoder.with_drafter("ar")
        rows = beside.options.rows
        if rows not in plain:
            plain[rows] = beside.generate(ids, max_new_tokens=64).output_ids
        assert decoder.generate(ids, max_new_tokens=64).output_ids == plain[rows], options


def test_drafts_are_accepted(tiny_folder):
    """The tests above also exercise commits off the first branch: on these models drafts do come true."""
    result = ids_decoder(tiny_folder("tied"), tree="dynamic", masks=1, budget=60).generate(
        prompt(70), max_new_tokens=48
    )
    assert result.decode_calls < 47


ALL = (
    os.environ.get("ESP_GOLDEN") == "all"
)  # every prompt, budget and number of masks; else one prompt a budget
DEMO_DRAFTS = [{"budget": budget, "masks": masks} for budget in (10, 30, 60) for masks in (1, 2, 3)]


@pytest.mark.parametrize("options", DEMO_DRAFTS if ALL else DEMO_DRAFTS[::4], ids=str)
def test_demo_model_with_dynamic_trees(options, smollm2):
    """What transformers decoded."""
    cases = golden()
    if not ALL:
        cases = [cases[-1 - DEMO_DRAFTS.index(options)]]
    decoder = smollm2.with_drafter("esp", **options)
    for case in cases:
        assert decoder.generate(case["prompt_ids"], max_new_tokens=100).output_ids == case["output_ids"]
