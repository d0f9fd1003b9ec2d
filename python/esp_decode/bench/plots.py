"""The table as pictures: tau and S/R by budget and by category, acceptance by depth."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from esp_decode.bench.cells import PLAIN, Cell
from esp_decode.bench.run import Record
from esp_decode.bench.table import OVERALL, Row, depths


def draw(cells: Sequence[Cell], rows: Sequence[Row], records: Sequence[Record], folder: Path) -> list[Path]:
    """by_budget, by_category and by_depth, as PNG and SVG. ModuleNotFoundError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = []
    for name, picture in {
        "by_budget": lambda: _by_budget(pyplot, rows),
        "by_category": lambda: _by_category(pyplot, rows),
        "by_depth": lambda: _by_depth(pyplot, cells, records),
    }.items():
        figure = picture()
        for form in ("png", "svg"):
            path = folder / f"{name}.{form}"
            figure.savefig(path, dpi=150, bbox_inches="tight")
            written.append(path)
        pyplot.close(figure)
    return written


def _by_budget(pyplot: Any, rows: Sequence[Row]) -> Any:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    overall = [row for row in rows if row.category == OVERALL and row.drafter != PLAIN]
    for drafter in dict.fromkeys(row.drafter for row in overall):
        mine = sorted((row for row in overall if row.drafter == drafter), key=lambda row: row.budget)
        budgets = [row.budget for row in mine]
        for axes, name in ((left, "tau"), (right, "speedup")):
            middle = [getattr(row, name) for row in mine]
            low = [m - getattr(row, f"{name}_low") for m, row in zip(middle, mine, strict=True)]
            high = [getattr(row, f"{name}_high") - m for m, row in zip(middle, mine, strict=True)]
            axes.errorbar(budgets, middle, yerr=(low, high), marker="o", capsize=3, label=drafter)
    for axes, label in ((left, "tokens per decode call (tau)"), (right, "speed over plain decoding (S/R)")):
        axes.set(xlabel="budget (rows of a forward)", ylabel=label)
        axes.axhline(1.0, color="grey", linewidth=0.8)
    left.legend(fontsize="small")
    return figure


def _by_category(pyplot: Any, rows: Sequence[Row]) -> Any:
    figure, axes = pyplot.subplots(2, 1, figsize=(11, 7), sharex=True)
    most = max(row.budget for row in rows)
    mine = [row for row in rows if row.budget == most and row.drafter != PLAIN]
    categories = list(dict.fromkeys(row.category for row in mine))
    drafters = list(dict.fromkeys(row.drafter for row in mine))
    for i, drafter in enumerate(drafters):
        found = {row.category: row for row in mine if row.drafter == drafter}
        places = [c + (i + 0.5) / len(drafters) * 0.8 - 0.4 for c in range(len(categories))]
        for one, name in zip(axes, ("tau", "speedup"), strict=True):
            heights = [getattr(found[category], name) for category in categories]
            one.bar(places, heights, width=0.8 / len(drafters), label=drafter)
    axes[0].set(ylabel="tau", title=f"budget {most}")
    axes[1].set(ylabel="S/R")
    axes[1].set_xticks(range(len(categories)), categories, rotation=30, ha="right")
    axes[0].legend(fontsize="small")
    return figure


def _by_depth(pyplot: Any, cells: Sequence[Cell], records: Sequence[Record]) -> Any:
    figure, axes = pyplot.subplots(figsize=(6, 4))
    most = max(cell.budget for cell in cells)
    for cell in cells:
        if cell.budget == most and cell.drafter != PLAIN:
            shares = depths(cell, records)
            axes.plot(range(1, len(shares) + 1), shares, marker="o", label=cell.name)
    axes.set(xlabel="depth of a draft", ylabel="share of calls that accept it", title=f"budget {most}")
    axes.legend(fontsize="small")
    return figure
