import pytest
import torch
from safetensors.torch import save_file

from esp_decode.names import PROBES
from esp_decode.probe import Probe
from esp_decode.weights import load_model


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(tiny_folder("llama"), torch.float32, torch.device("cpu"))


PROMPT = torch.tensor([[5, 9, 9, 100]], dtype=torch.int32)


def initial(kind, model, prompt, masks):
    return Probe.parse(kind, None).initial(model, prompt, masks)


@pytest.mark.parametrize("kind", ["prompt-mean", "frozen"])
def test_prompt_mean_is_equation_4(model, kind):
    probe = initial(kind, model, PROMPT, 2)
    expected = sum(model.embedding[t] for t in [5, 9, 9, 100]) / 4
    torch.testing.assert_close(probe[0, 0], expected)
    assert torch.equal(probe[0, 0], probe[0, 1])


def test_of_the_vocabulary(model):
    mean = initial("vocab-mean", model, PROMPT, 3)[0, 2]
    torch.testing.assert_close(mean, model.embedding.mean(dim=0))
    median = initial("vocab-median", model, PROMPT, 3)[0, 2]
    assert torch.equal(median, model.embedding.median(dim=0).values)


def test_last_k_in_order(model):
    assert torch.equal(initial("last-k", model, PROMPT, 2)[0], model.embedding[[9, 100]])
    assert torch.equal(initial("last-k", model, PROMPT[:, :1], 3)[0], model.embedding[[5, 5, 5]])


def test_sample_is_reproducible_and_differs_by_mask(model):
    probe = initial("sample", model, PROMPT, 2)
    assert torch.equal(probe, initial("sample", model, PROMPT, 2))
    assert not torch.equal(probe[0, 0], probe[0, 1])
    many = initial("sample", model, PROMPT, 4000)[0]
    torch.testing.assert_close(many.std(dim=0), model.embedding.std(dim=0), rtol=0.1, atol=0.0)


def test_prompt_direction_steps_off_the_mean(model):
    step = initial("prompt-direction", model, PROMPT, 1) - initial("prompt-mean", model, PROMPT, 1)
    torch.testing.assert_close(step[0, 0], model.embedding[9] - model.embedding[5])
    short = PROMPT[:, :1]
    assert torch.equal(initial("prompt-direction", model, short, 1), initial("prompt-mean", model, short, 1))


@pytest.mark.parametrize("kind", PROBES)
def test_one_probe_for_each_sequence(model, kind):
    prompts = torch.cat([PROMPT, PROMPT.flip(1)])
    both = initial(kind, model, prompts, 2)
    assert both.shape == (2, 2, model.embedding.shape[1])
    assert both.dtype == torch.float32
    if kind != "sample":
        for b in range(2):
            assert torch.equal(both[b : b + 1], initial(kind, model, prompts[b : b + 1], 2))


def test_vectors_of_a_file(model, tmp_path):
    file = tmp_path / "vectors.safetensors"
    vectors = torch.randn(2, model.embedding.shape[1])
    save_file({"probe": vectors}, file)
    probe = Probe.parse(str(file), None)
    assert probe.lam == 0
    probe.check(model, 2)
    assert torch.equal(probe.initial(model, PROMPT, 1)[0], vectors[:1])
    with pytest.raises(ValueError, match=r"has vectors for 2 masks, got masks=3"):
        probe.check(model, 3)


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"other": torch.zeros(1, 2)}, r"must have a tensor 'probe' \[masks, width\] of floats, got no such"),
        ({"probe": torch.zeros(2)}, r"of floats, got \[2\] torch.float32"),
        ({"probe": torch.zeros(1, 2).int()}, r"of floats, got \[1, 2\] torch.int32"),
    ],
)
def test_a_file_without_vectors(tmp_path, tensors, sentence):
    file = tmp_path / "v.safetensors"
    save_file(tensors, file)
    with pytest.raises(ValueError, match=sentence):
        Probe.parse(str(file), None)


def test_a_file_that_is_none(tmp_path):
    file = tmp_path / "v.safetensors"
    for _ in range(2):
        with pytest.raises(ValueError, match="is not a readable safetensors file: "):
            Probe.parse(str(file), None)
        file.write_text("words")


def test_vectors_of_another_width(model, tmp_path):
    file = tmp_path / "v.safetensors"
    save_file({"probe": torch.zeros(1, 3)}, file)
    width = model.embedding.shape[1]
    with pytest.raises(ValueError, match=f"is 3 wide, the model's embeddings are {width}"):
        Probe.parse(str(file), None).check(model, 1)


@pytest.mark.parametrize(
    ("kind", "lam", "sentence"),
    [
        ("x", None, "probe must be one of prompt-mean, .* or a .safetensors file, got 'x'"),
        ("prompt-mean", 1.5, "lam must be 0 to 1, got 1.5"),
        ("frozen", 0.1, "lam must be 0 with probe 'frozen', got 0.1; 'prompt-mean' follows"),
    ],
)
def test_an_unknown_probe(kind, lam, sentence):
    with pytest.raises(ValueError, match=sentence):
        Probe.parse(kind, lam)
