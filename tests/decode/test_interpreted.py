"""The whole decode loop on Triton kernels, interpreted: the same tokens as on the native CPU ops."""

import pytest
import torch

from esp_kernels import _backend, _library

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


@pytest.mark.skipif(not _backend.interpreting(), reason="kernels run natively on this machine")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("mistral-window", {"drafter": "ar"}),
        ("mistral-window", {"budget": 8, "masks": 1, "probe": "prompt-mean"}),
        ("qwen3", {"tree": "static:2,1", "masks": 2, "prune": False}),
    ],
)
def test_interpreted_kernels_decode_the_same_tokens(kind, options, tiny_folder, request):
    prompt = torch.randint(0, 128, (26,), generator=torch.Generator().manual_seed(0)).tolist()
    decoder = ids_decoder(tiny_folder(kind), **options)
    native = decoder.generate(prompt, max_new_tokens=6)
    calls = request.getfixturevalue("on_triton")
    interpreted = decoder.generate(prompt, max_new_tokens=6)
    assert interpreted.output_ids == native.output_ids
    assert interpreted.decode_calls == native.decode_calls
    of_joined = {"remember_block", "learn_weights", "join_tree"}
    assert set(_library.SCHEMAS) - calls.keys() == {"linear_rows", "verify_tree", "update_probe", *of_joined}
