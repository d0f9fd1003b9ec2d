"""Trained heads as data: a folder with a config.json and one safetensors file."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from esp_decode.weights import Tensors

if TYPE_CHECKING:
    from esp_decode.model import Model


def open_heads(folder: Path, stem: str, model: "Model") -> Tensors:
    """The tensors of `stem`.safetensors, in the model's dtype and on its device. ValueError where there are
    none, with how to convert what was published as a pickle."""
    pickles = sorted(path for path in folder.glob("*.*") if path.suffix in (".pt", ".bin", ".pth"))
    if pickles and not any(folder.glob(f"{stem}.safetensors*")):
        raise ValueError(
            f"heads {str(folder)!r} hold {pickles[0].name}, a pickle, which is not read; convert it: "
            f"safetensors.torch.save_file(torch.load({pickles[0].name!r}, weights_only=True), "
            f"'{stem}.safetensors')"
        )
    return Tensors(folder, model.dtype, model.device, stem, fitting="the model")


def read_counts(folder: Path, *names: str) -> list[int]:
    """What the folder's config.json says; each at least 1."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"heads {str(folder)!r} have no config.json")
    try:
        config = dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a readable config: {error}") from error
    for name in names:
        value = config.get(name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{path} must have {name} of at least 1, got {value!r}")
    return [config[name] for name in names]
