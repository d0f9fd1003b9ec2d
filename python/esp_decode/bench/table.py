"""The paper's table from records: by drafter, budget and category."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from esp_decode.bench.cells import PLAIN, Cell
from esp_decode.bench.run import Record
from esp_decode.ratios import with_interval

OVERALL = "overall"


@dataclass(frozen=True)
class Row:
    """A cell in a category, or in all.

    tau             tokens committed per decode call, and its 95 % confidence interval
    speedup         S/R: wall time of plain decoding over the cell's, on the same prompts, and its interval
    call_reduction  1 - 1/tau
    exact           share of the prompts whose output is that of plain decoding
    """

    drafter: str
    budget: int
    category: str
    prompts: int
    tau: float
    tau_low: float
    tau_high: float
    speedup: float
    speedup_low: float
    speedup_high: float
    call_reduction: float
    exact: float


def rows_of(cells: Sequence[Cell], records: Sequence[Record]) -> list[Row]:
    """Of the questions that every cell has decoded; overall first, then categories in their order."""
    by_question: dict[int, dict[str, Record]] = {}
    for record in records:
        by_question.setdefault(record["question"], {})[record["cell"]] = record
    keys = [cell.key for cell in cells]
    whole = [found for _, found in sorted(by_question.items()) if all(key in found for key in keys)]
    categories = dict.fromkeys(found[PLAIN]["category"] for found in whole)
    groups = {OVERALL: whole} | {
        name: [found for found in whole if found[PLAIN]["category"] == name] for name in categories
    }
    return [_row(cell, name, group) for cell in cells for name, group in groups.items() if group]


def _row(cell: Cell, category: str, group: Sequence[dict[str, Record]]) -> Row:
    mine, plain = [found[cell.key] for found in group], [found[PLAIN] for found in group]
    tau, low, high = with_interval([(sum(one["committed"]), len(one["committed"])) for one in mine])
    seconds = [(p["seconds"], m["seconds"]) for p, m in zip(plain, mine, strict=True)]
    speedup, slow, fast = with_interval(seconds)
    exact = sum(p["output"] == m["output"] for p, m in zip(plain, mine, strict=True)) / len(group)
    sizes = (cell.name, cell.budget, category, len(group))
    return Row(*sizes, tau, low, high, speedup, slow, fast, 1 - 1 / tau, exact)


def write(rows: Sequence[Row], folder: Path) -> None:
    """table.json, table.csv and table.md."""
    (folder / "table.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    text = io.StringIO()
    writer = csv.DictWriter(text, list(asdict(rows[0])), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    (folder / "table.csv").write_text(text.getvalue())
    (folder / "table.md").write_text(markdown(rows))


def markdown(rows: Sequence[Row]) -> str:
    """Overall with intervals; tau and S/R by category."""
    lines = ["| drafter | budget | tau | S/R | call reduction | exact |", "|---|---|---|---|---|---|"]
    for row in rows:
        if row.category == OVERALL:
            tau = f"{row.tau:.2f} ({row.tau_low:.2f} to {row.tau_high:.2f})"
            speed = f"{row.speedup:.2f}x ({row.speedup_low:.2f} to {row.speedup_high:.2f})"
            reduced, exact = f"{row.call_reduction:.0%}", f"{row.exact:.0%}"
            lines.append(f"| {row.drafter} | {row.budget} | {tau} | {speed} | {reduced} | {exact} |")
    categories = list(dict.fromkeys(row.category for row in rows if row.category != OVERALL))
    if len(categories) > 1:
        lines += ["", "tau and S/R by category:", ""]
        lines.append(f"| drafter | budget | {' | '.join(categories)} |")
        lines.append("|---" * (2 + len(categories)) + "|")
        found = {(row.drafter, row.budget, row.category): row for row in rows}
        for drafter, budget in dict.fromkeys((row.drafter, row.budget) for row in rows):
            cells = [found[drafter, budget, name] for name in categories]
            text = " | ".join(f"{cell.tau:.2f}, {cell.speedup:.2f}x" for cell in cells)
            lines.append(f"| {drafter} | {budget} | {text} |")
    return "\n".join(lines) + "\n"


def depths(cell: Cell, records: Sequence[Record]) -> list[float]:
    """The share of decode calls that accept a draft at depth 1, 2, ..., as deep as any does."""
    committed = [count for record in records if record["cell"] == cell.key for count in record["committed"]]
    deepest = max(committed, default=1) - 1
    return [sum(count > depth for count in committed) / len(committed) for depth in range(1, deepest + 1)]
