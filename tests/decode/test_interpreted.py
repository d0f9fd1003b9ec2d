"""The whole decode loop on Triton kernels, interpreted: the same tokens as on the native CPU ops."""

import pytest
import torch

from esp_kernels import _backend

from .conftest import ids_decoder


@pytest.fixture
def on_triton(monkeypatch):
    """What `auto` would take on a GPU; linear layers stay on the CPU. Counts the calls of each op."""
    calls: dict[str, int] = {}

    def select(op, backend, tensor, name):
        if not _backend.has_triton_kernel(op):
            return _backend._select(op, backend, "cpu")
        calls[op] = calls.get(op, 0) + 1
        return _backend._select(op, "triton", "cpu")

    monkeypatch.setattr(_backend, "select", select)
    return calls


OPTIONS = [
    {"drafter": "ar"},
    {"budget": 10, "masks": 1, "probe": "prompt-mean"},
    {"tree": "static:3,2", "masks": 2, "prune": False},
]


@pytest.mark.skipif(not _backend.interpreting(), reason="kernels run natively on this machine")
@pytest.mark.parametrize("kind", ["mistral-window", "qwen3"])
def test_interpreted_kernels_decode_the_same_tokens(kind, tiny_folder, request):
    prompt = torch.randint(0, 128, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    decoders = [ids_decoder(tiny_folder(kind), **options) for options in OPTIONS]
    expected = [decoder.generate(prompt, max_new_tokens=12) for decoder in decoders]
    calls = request.getfixturevalue("on_triton")
    for decoder, native in zip(decoders, expected, strict=True):
        interpreted = decoder.generate(prompt, max_new_tokens=12)
        assert interpreted.output_ids == native.output_ids
        assert interpreted.decode_calls == native.decode_calls
    assert {"tree_attention", "rope_append", "advance_block", "commit_kv", "topk_logprobs"} <= calls.keys()
