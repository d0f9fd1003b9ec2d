"""The command `esp calibrate`."""

import argparse
import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from esp_decode import prompts
from esp_decode.prompts import Prompt

if TYPE_CHECKING:
    from esp_decode.calibrate.calibration import Stage
    from esp_decode.decoder import Decoder
    from esp_decode.profile import Profile


def calibrate(arguments: argparse.Namespace, out: TextIO) -> None:
    """ValueError on bad input. A run that was interrupted goes on where it was when it is started again."""
    queue = prompts.from_file(arguments.prompts)
    from transformers.utils import logging

    from esp_decode import Decoder
    from esp_decode.calibrate.calibration import Calibration
    from esp_decode.calibrate.parts import Parts
    from esp_decode.profile import cached_profile
    from esp_decode.weights import checkpoint_folder, fingerprint

    logging.disable_progress_bar()  # it would break into ours
    logging.set_verbosity_error()
    options = {name: getattr(arguments, name) for name in ("dtype", "device", "threads")}
    decoder = Decoder.from_pretrained(arguments.model, drafter="joined", **options)
    checkpoint = checkpoint_folder(arguments.model)
    model = fingerprint(checkpoint)
    ids = [_encoded(decoder, prompt, arguments.max_new_tokens) for prompt in queue]
    folder = arguments.out or cached_profile(model)
    settings = {
        "model": model,
        "prompts": hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
        "max_new_tokens": arguments.max_new_tokens,
        "dtype": decoder.dtype,
        "device": decoder.device,
        "tune": arguments.tune,
    }
    parts = Parts(folder.with_name(f"{folder.name}.unfinished"), settings)
    with _progress() as stage:
        run = Calibration(decoder, checkpoint, parts, stage, arguments.seconds)
        profile = run.run(ids, arguments.max_new_tokens, arguments.tune)
    profile.save(folder)
    parts.remove()
    _print(profile, folder, out)


def _encoded(decoder: "Decoder", prompt: Prompt, new_tokens: int) -> list[int]:
    """Token ids of a prompt that the decoder finds in order."""
    try:
        ids = decoder.encode(prompt.content) if isinstance(prompt.content, str) else prompt.content
        decoder.stream(ids, max_new_tokens=new_tokens)
    except ValueError as error:
        raise ValueError(f"{prompt.where}{error}") from error
    return ids


@contextlib.contextmanager
def _progress() -> "Iterator[Stage]":
    """A bar for each stage, on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def stage(name: str) -> Callable[[int, int], None]:
            task = bars.add_task(name, total=None)
            return lambda done, total: bars.update(task, completed=done, total=total)

        yield stage


def _print(profile: "Profile", folder: Path, out: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(file=out, highlight=False)
    probes = Table(title="tau of one mask at budget 30, by probe")
    for column in ("probe", "tau"):
        probes.add_column(column)
    for kind, tau in sorted(profile.facts["tau by probe"].items(), key=lambda item: -item[1]):
        probes.add_row(kind, f"{tau:.3f}")
    budgets = list(profile.facts["tau"]["joined"])
    expected = Table(
        title=f"tau to expect with probe {profile.probe.kind}, joined at least (95 % confidence)"
    )
    for column in ("drafter", *(f"budget {budget}" for budget in budgets)):
        expected.add_column(column)
    for drafter, by_budget in profile.facts["tau"].items():
        cells = (by_budget[budget] for budget in budgets)
        expected.add_row(drafter, *(f"{tau:.2f} ({low:.2f} to {high:.2f})" for tau, low, high in cells))
    console.print(probes)
    console.print(expected)
    console.print(f"The profile lies in {folder}.", soft_wrap=True)
