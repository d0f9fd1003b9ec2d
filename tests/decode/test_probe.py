import pytest
import torch

from esp_decode.probe import initial_probe
from esp_decode.weights import load_model


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(tiny_folder("llama"), torch.float32, torch.device("cpu"))


PROMPT = torch.tensor([[5, 9, 9, 100]], dtype=torch.int32)


def test_prompt_mean_is_equation_4(model):
    probe = initial_probe("prompt-mean", model, PROMPT, 2)
    expected = sum(model.embedding[t] for t in [5, 9, 9, 100]) / 4
    torch.testing.assert_close(probe[0, 0], expected)
    assert torch.equal(probe[0, 0], probe[0, 1])


def test_vocab_mean(model):
    torch.testing.assert_close(
        initial_probe("vocab-mean", model, PROMPT, 3)[0, 2], model.embedding.mean(dim=0)
    )


def test_last_k_in_order(model):
    assert torch.equal(initial_probe("last-k", model, PROMPT, 2)[0], model.embedding[[9, 100]])
    assert torch.equal(initial_probe("last-k", model, PROMPT[:, :1], 3)[0], model.embedding[[5, 5, 5]])


def test_sample_is_reproducible_and_differs_by_mask(model):
    probe = initial_probe("sample", model, PROMPT, 2)
    assert torch.equal(probe, initial_probe("sample", model, PROMPT, 2))
    assert not torch.equal(probe[0, 0], probe[0, 1])
    many = initial_probe("sample", model, PROMPT, 4000)[0]
    torch.testing.assert_close(many.std(dim=0), model.embedding.std(dim=0), rtol=0.1, atol=0.0)


def test_an_unknown_probe(model):
    with pytest.raises(
        ValueError, match="probe must be one of prompt-mean, vocab-mean, last-k, sample, got 'x'"
    ):
        initial_probe("x", model, PROMPT, 1)
