"""The commands `esp bench` and `esp ablate`."""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from esp_decode.bench import ablations, cells, datasets
from esp_decode.bench.cells import Cell

OPTIONS = ("dtype", "device", "threads", "profile")
PREFIXES = (512, 4096, 32768)  # cached tokens, of ablation `structure`


def bench(arguments: argparse.Namespace, out: TextIO) -> None:
    """ValueError on bad input. What an interrupted run has finished is kept, and the same command goes on."""
    _compare(arguments, cells.parse(arguments.drafters, arguments.budgets), out)


def ablate(arguments: argparse.Namespace, out: TextIO) -> None:
    if arguments.name == ablations.STRUCTURE:
        _structure(arguments, out)
    elif arguments.prompts is None:
        raise ValueError(f"the ablation {arguments.name!r} needs --prompts")
    else:
        _compare(arguments, ablations.cells_of(arguments.name, arguments.budgets), out)


def _compare(arguments: argparse.Namespace, compared: Sequence[Cell], out: TextIO) -> None:
    questions = datasets.load(arguments.prompts, arguments.per_category)
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    from esp_decode import Decoder
    from esp_decode.bench import plots, run, table
    from esp_decode.weights import checkpoint_folder, fingerprint

    options = {name: getattr(arguments, name) for name in OPTIONS}
    decoder = Decoder.from_pretrained(arguments.model, drafter="ar", **options)
    for cell in compared:
        decoder.with_drafter(cell.drafter, **run.options_of(cell))
    profile = decoder.options.profile
    settings = {
        "model": fingerprint(checkpoint_folder(arguments.model)),
        "questions": _digest([asdict(question) for question in questions]),
        "max_new_tokens": arguments.max_new_tokens,
        "profile": None if profile is None else _digest(profile.facts),
        "dtype": decoder.dtype,
        "device": decoder.device,
    }
    folder: Path = arguments.out
    results = run.Results(folder, settings)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("decoding", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        try:
            run.run(decoder, questions, compared, results, arguments.max_new_tokens, progress)
        except KeyboardInterrupt:
            bar.stop()
            print(f"esp: what is finished is kept in {folder}; the same command goes on", file=sys.stderr)
            raise
    rows = table.rows_of(compared, results.records)
    table.write(rows, folder)
    out.write(table.markdown(rows))
    try:
        plots.draw(compared, rows, results.records, folder)
    except ModuleNotFoundError as error:
        print(f"esp: no plots: {error.name} is not installed", file=sys.stderr)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _structure(arguments: argparse.Namespace, out: TextIO) -> None:
    from esp_decode.bench.structure import microseconds

    out.write("| budget | cached tokens | naive, us | cached, us | bits, us |\n|---|---|---|---|---|\n")
    for budget in arguments.budgets:
        for prefix in PREFIXES:
            times = " | ".join(f"{time:.0f}" for time in microseconds(budget, prefix).values())
            out.write(f"| {budget} | {prefix} | {times} |\n")
