"""Every question decoded by every cell, one record each, kept as soon as it is made."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esp_decode.bench.cells import Cell
from esp_decode.bench.datasets import Question

if TYPE_CHECKING:
    from esp_decode.decoder import Decoder

SETTINGS, RECORDS = "settings.json", "cells.jsonl"
WARM_UP = 8  # tokens

Record = dict[str, Any]
"""question (its number), category, cell (its key), committed (tokens of each decode call), seconds (prefill
and decoding), output (a hash of the token ids)."""


class Results:
    """The records in a folder. ValueError where it holds those of other settings."""

    def __init__(self, folder: Path, settings: dict[str, Any]):
        self._path = folder / RECORDS
        folder.mkdir(parents=True, exist_ok=True)
        known, wanted = folder / SETTINGS, json.dumps(settings, indent=1) + "\n"
        if not known.is_file():
            known.write_text(wanted)
        elif known.read_text() != wanted:
            raise ValueError(f"{folder} holds results with other settings; choose another folder")
        self.records: list[Record] = []
        if self._path.is_file():
            whole = [line for line in self._path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            self._path.write_text("".join(whole))  # without what an interrupt cut short
            self.records = [json.loads(line) for line in whole]
        self._done = {(record["question"], record["cell"]) for record in self.records}

    def has(self, question: int, cell: Cell) -> bool:
        return (question, cell.key) in self._done

    def add(self, record: Record) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.records.append(record)


def run(
    decoder: "Decoder",
    questions: Sequence[Question],
    cells: Sequence[Cell],
    results: Results,
    new_tokens: int,
    progress: Callable[[int, int], None],
) -> None:
    """What is missing. Cells take turns in going first, so that a machine that drifts favours none."""
    decoders = {cell.key: decoder.with_drafter(cell.drafter, **options_of(cell)) for cell in cells}
    left = [pair for pair in turns(questions, cells) if not results.has(*pair)]
    for cell in {cell.key: cell for _, cell in left}.values():
        decoders[cell.key].generate(questions[0].text, max_new_tokens=WARM_UP)
    total = len(questions) * len(cells)
    for done, (number, cell) in enumerate(left, total - len(left)):
        progress(done, total)
        question = questions[number]
        said = decoders[cell.key].generate(question.text, max_new_tokens=new_tokens)
        results.add(
            {
                "question": number,
                "category": question.category,
                "cell": cell.key,
                "committed": said.committed,
                "seconds": said.prefill_seconds + said.decode_seconds,
                "output": hashlib.sha256(json.dumps(said.output_ids).encode()).hexdigest()[:16],
            }
        )
    progress(total, total)


def options_of(cell: Cell) -> dict[str, Any]:
    return cell.options | ({} if cell.drafter == "ar" else {"budget": cell.budget})


def turns(questions: Sequence[Question], cells: Sequence[Cell]) -> Iterator[tuple[int, Cell]]:
    for number in range(len(questions)):
        first = number % len(cells)
        for cell in (*cells[first:], *cells[:first]):
            yield number, cell
