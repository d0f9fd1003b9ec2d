"""What a long run has finished, kept in a folder: an interrupted run goes on where it was."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


class Parts:
    """`settings` say what the run is of; ValueError where the folder holds parts of another one."""

    def __init__(self, folder: Path, settings: dict[str, Any]):
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        path, wanted = folder / "settings.json", json.dumps(settings, indent=1)
        if not path.is_file():
            path.write_text(wanted)
        elif path.read_text() != wanted:
            raise ValueError(f"{folder} holds an unfinished run with other settings; finish it or remove it")

    def has(self, name: str) -> bool:
        return self._path(name).is_file()

    def keep(self, name: str, make: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """What `make` gave, in this run or an earlier one."""
        path = self._path(name)
        if not path.is_file():
            unfinished = path.with_suffix(".unfinished")
            save_file({k: t.cpu().contiguous() for k, t in make().items()}, unfinished)
            unfinished.rename(path)
        return load_file(path)

    def remove(self) -> None:
        shutil.rmtree(self._folder)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"
