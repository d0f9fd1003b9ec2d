"""From Nsight's CSV to what to do: `python -m profiling.summarise FILE`.

Of Nsight Compute's raw page (profiling.ncu): each kernel's time, rate and share of the peak that binds it,
and why it is not more. Of Nsight Systems' kernel summary (profiling.nsys): each op's share of the GPU's time.
"""

import argparse
import csv
import re
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from esp_kernels import _library

NAME = "Kernel Name"
NEAR_PEAK = 80.0  # % of peak from which a kernel is where it should be
FEW_WARPS = 25.0  # % of the warps that an SM can hold
PRODUCTS = re.compile(r"gemm|cutlass|nvjet|cublas|xmma", re.IGNORECASE)

Counters = dict[str, float]


@dataclass(frozen=True)
class Kernel:
    """The calls of one kernel, and the median of each counter, by its name in profiling.ncu.METRICS."""

    name: str
    calls: int
    counters: Counters

    @property
    def bound(self) -> str:
        """The resource that is nearest to its peak."""
        return max(("dram", "l2", "tensor", "sm"), key=lambda name: self.counters[name])

    @property
    def rate(self) -> float:
        """GB/s to and from memory."""
        moved = self.counters["dram_read"] + self.counters["dram_written"]
        return moved / self.counters["nanoseconds"]

    @property
    def why(self) -> str:
        """The first of the reasons that holds; the ones that a change of code removes come first."""
        c = self.counters
        if c["local_loads"] + c["local_stores"] > 0:
            return "registers are spilled to local memory"
        if c[self.bound] >= NEAR_PEAK:
            return f"it is: {self.bound} is near its peak"
        if c["waves"] < 1:
            return f"too few programs: {c['waves']:.2f} waves, so SMs stay idle"
        if c["waves"] < 4 and c["waves"] % 1 != 0:
            return f"the last of {c['waves']:.2f} waves leaves SMs idle"
        waits = {
            "wait_memory": "loads from memory: more of them in flight, or more warps",
            "wait_shared": "shared memory: conflicts between banks, or too many small accesses",
            "wait_barrier": "barriers: warps wait for each other",
            "wait_tensor": "matrix units: their queue is full",
            "wait_fixed": "its own instructions' latency: too few independent ones",
        }
        most = max(waits, key=lambda name: c[name])
        few = f", with {c['occupancy']:.0f} % of the warps" if c["occupancy"] < FEW_WARPS else ""
        return f"waits for {waits[most]}{few}"


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV, from the line of its names on; Nsight prints other lines before it."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    starts = ('"ID"', "ID,", "Time (%)", '"Time (%)"')
    first = next((i for i, line in enumerate(lines) if line.startswith(starts)), None)
    if first is None:
        raise ValueError(
            f"{path} has no table of Nsight Compute's raw page or Nsight Systems' kernel summary"
        )
    return list(csv.DictReader(lines[first:]))


def number(text: str, path: Path, column: str) -> float:
    if text == "n/a":  # a counter that this card does not have
        return 0.0
    try:
        return float(text.replace(",", ""))
    except (ValueError, AttributeError):
        raise ValueError(f"{path} has {text!r} for a number in column {column!r}") from None


def kernels(rows: list[dict[str, str]], path: Path) -> list[Kernel]:
    """Of the raw page, whose first row has units; most time first."""
    from profiling.ncu import METRICS

    lacking = [metric for metric in METRICS.values() if metric not in rows[0]]
    if lacking:
        raise ValueError(f"{path} lacks {', '.join(lacking)}: collect it by profiling.ncu")
    calls: dict[str, list[Counters]] = {}
    for row in rows:
        if row["ID"]:
            counters = {name: number(row[metric], path, metric) for name, metric in METRICS.items()}
            calls.setdefault(short(row[NAME]), []).append(counters)
    if not calls:
        raise ValueError(f"{path} has no kernels")
    found = [
        Kernel(name, len(all_), {c: statistics.median(one[c] for one in all_) for c in METRICS})
        for name, all_ in calls.items()
    ]
    return sorted(found, key=lambda kernel: -kernel.calls * kernel.counters["nanoseconds"])


def short(name: str) -> str:
    """Without namespaces, template arguments and parameters."""
    return re.sub(r"^.*::", "", re.sub(r"[<(].*", "", name.removeprefix("void ").strip()))


def op_of(name: str) -> str:
    """The op that a kernel belongs to."""
    bare = short(name).lstrip("_")
    ops = [op for op in _library.SCHEMAS if bare.startswith(op)]
    if ops:
        return max(ops, key=len)
    return "products" if PRODUCTS.search(name) else "others"


def shares(rows: list[dict[str, str]], path: Path) -> list[tuple[str, int, float]]:
    """(op, calls, seconds) of the kernel summary, most time first."""
    columns = ("Total Time (ns)", "Instances", "Name")
    lacking = [column for column in columns if column not in rows[0]]
    if lacking:
        raise ValueError(f"{path} lacks the columns {', '.join(lacking)}: write it by profiling.nsys")
    found: dict[str, tuple[int, float]] = {}
    for row in rows:
        spent, calls = (number(row[column], path, column) for column in columns[:2])
        before = found.get(op_of(row["Name"]), (0, 0.0))
        found[op_of(row["Name"])] = (before[0] + int(calls), before[1] + spent / 1e9)
    return sorted(((op, *rest) for op, rest in found.items()), key=lambda one: -one[2])


def kernel_lines(found: Iterable[Kernel]) -> Iterable[str]:
    yield f"{'kernel':40}{'calls':>6}{'us':>10}{'GB/s':>8}{'of peak':>16}{'regs':>6}  why not more"
    for kernel in found:
        c = kernel.counters
        peak = f"{kernel.bound} {c[kernel.bound]:.0f} %"
        yield (
            f"{kernel.name[:39]:40}{kernel.calls:6}{c['nanoseconds'] / 1e3:10.1f}{kernel.rate:8.0f}{peak:>16}"
            f"{c['registers']:6.0f}  {kernel.why}"
        )


def share_lines(found: list[tuple[str, int, float]]) -> Iterable[str]:
    total = sum(seconds for *_, seconds in found) or 1.0
    yield f"{'op':20}{'calls':>8}{'us':>12}{'share':>8}"
    for op, calls, seconds in found:
        yield f"{op:20}{calls:8}{seconds * 1e6:12.1f}{seconds / total:8.1%}"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.summarise",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path)
    path = parser.parse_args(words).file
    try:
        rows = read_table(path)
        if not rows:
            raise ValueError(f"{path} has no kernels")
        lines = kernel_lines(kernels(rows, path)) if NAME in rows[0] else share_lines(shares(rows, path))
        print("\n".join(lines))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
