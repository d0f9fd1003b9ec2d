"""What the kernels must reach on a card, held against what was measured: met, missed, or not measured."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

MAIN = {"model": "llama-3.1-8b", "batch": 1}
MINE = ("triton", "cuda")

Row = dict[str, Any]
Comparison = tuple[str, float, float]  # where, measured, asked for


@dataclass(frozen=True)
class Target:
    sentence: str
    measured: list[Comparison]
    at_least: bool = True

    @property
    def missed(self) -> list[Comparison]:
        return [c for c in self.measured if not (c[1] >= c[2] if self.at_least else c[1] <= c[2])]

    def __str__(self) -> str:
        if not self.measured:
            return f"not measured  {self.sentence}"
        if not self.missed:
            return f"met           {self.sentence}"
        where = ", ".join(f"{where}: {got:.3g} against {asked:.3g}" for where, got, asked in self.missed)
        return f"missed        {self.sentence} ({where})"


def targets(ops: list[Row], roof: Row | None, steps: list[Row], bits: bool | None) -> list[Target]:
    """Of the rows of bench.gpu.ops and bench.gpu.step; `bits` is whether bench.gpu.bits passed."""
    mine = _fastest(row for row in ops if row["implementation"] in MINE and "us" in row)
    attention = {(r["rows"], r["prefix"]): r for r in mine if r["op"] == "tree_attention" and _is_main(r)}
    peers = [r for r in ops if r["op"] == "tree_attention" and r["implementation"] not in MINE and "us" in r]

    def of_copy(prefixes: Iterable[int], share: float) -> list[Comparison]:
        found = {p: attention[60, p]["GB/s"] * 1e9 for p in prefixes if roof and (60, p) in attention}
        return [(f"{p} cached", rate / roof["bandwidth"], share) for p, rate in found.items()]

    one_row = [
        (f"{rows} rows, {p} cached", row["us"] / attention[1, p]["us"], 1.15)
        for (rows, p), row in attention.items()
        if rows > 1 and (1, p) in attention and row["memory_bound"]
    ]
    ahead = [
        (f"{peer['implementation']}, {_where(peer)}", peer["us"] / row["us"], 1.0)
        for peer in peers
        for row in mine
        if row["op"] == "tree_attention" and _where(row) == _where(peer)
    ]
    control = [
        (f"{r['rows']} rows", r["us"], 15.0) for r in mine if r["op"] == "advance_block" and _is_main(r)
    ]
    long = [prefix for rows, prefix in attention if rows == 60 and prefix >= 32768]
    same = [] if bits is None else [("", float(bits), 1.0)]

    def of_block(key: str, asked: float) -> list[Comparison]:
        return [("", row[key], asked) for row in steps if row["budget"] == 60]

    return [
        Target("tree_attention, 60 rows, 32k cached or more: 85 % of a copy", of_copy(long, 0.85)),
        Target("tree_attention, 60 rows, 4k cached: 60 % of a copy", of_copy([4096], 0.6)),
        Target("tree_attention: at most 1.15 x one row while bound by memory", one_row, False),
        Target("tree_attention: ahead of every peer", ahead),
        Target("step of 60 rows: at most 1.05 x plain", of_block("over_plain", 1.05), False),
        Target("step of 60 rows: at most 8 % outside of products", of_block("outside_products", 0.08), False),
        Target("step control: at most 15 us", control, False),
        Target("plain and tree decoding: the same bits", same),
    ]  # fmt: skip


def _is_main(row: Row) -> bool:
    return MAIN.items() <= row.items()


def _where(row: Row) -> str:
    return f"{row['model']} {row['rows']} rows, {row['prefix']} cached, batch {row['batch']}"


def _fastest(rows: Iterable[Row]) -> list[Row]:
    """Of each op and size the faster of our implementations."""
    best: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = row["op"], _where(row)
        if key not in best or row["us"] < best[key]["us"]:
            best[key] = row
    return list(best.values())
