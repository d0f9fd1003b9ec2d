"""The ops at decode sizes, and tree_attention beside its peers, against the roof measured in the same run."""

import argparse
import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import torch

from bench import cases
from bench.cases import Run, Size
from bench.gpu import peers
from bench.gpu.timing import ColdTimer, Roof
from esp_kernels import _backend

MODELS = ("llama-3.1-8b", "llama-3.2-3b", "qwen3-8b", "qwen3-32b")
ROWS = (60, 1, 10, 30, 120)
PREFIXES = (32768, 4096, 128, 1024, 16384, 131072)
BATCHES = (1, 8, 32)
MEMORY = 0.4  # of the card's, for one layer's cache

Timer = Callable[[Run], float]


def sizes() -> Iterator[tuple[str, Size]]:
    """(op, size), each once and what matters most first, since the time may run out."""
    seen = set()
    for one in in_order():
        if one not in seen:
            seen.add(one)
            yield one


def in_order() -> Iterator[tuple[str, Size]]:
    """tree_attention of the first model, every other op, then models and batches, then all together."""
    for prefix in PREFIXES:
        for rows in ROWS:
            yield "tree_attention", Size.of(MODELS[0], rows, prefix)
    for op in cases.OPS:
        if op != "tree_attention":
            for rows in (60, 1):
                yield op, Size.of(MODELS[0], rows, 4096)
    for batch, model, prefix in product(BATCHES, MODELS, (4096, 32768)):
        yield "tree_attention", Size.of(model, 60, prefix, batch)
    for op in cases.OPS:
        if op != "tree_attention":
            for batch in BATCHES[1:]:
                yield op, Size.of(MODELS[0], 60, 4096, batch)
    for batch, model, rows, prefix in product(BATCHES, MODELS, ROWS, PREFIXES):
        yield "tree_attention", Size.of(model, rows, prefix, batch)


def runs(op: str, size: Size) -> Iterator[tuple[str, Callable[[], Run]]]:
    """Each implementation's name and what makes its call."""
    backends = [b for b in ("triton", "cuda") if _backend.why_not(op, b, "cuda") is None]
    for backend in backends:
        yield backend, lambda backend=backend: cases.OPS[op](size, backend)
    if op == "tree_attention":
        for peer in peers.PEERS:
            yield peer.__name__, lambda peer=peer: peer(size)


def measure(op: str, size: Size, timer: Timer, roof: Roof) -> Iterator[dict]:
    """A row of each implementation; one that fails says so in its row."""
    moved, flops = size.cost(op)
    what = {"op": op, "model": size.model, "rows": size.rows, "prefix": size.prefix, "batch": size.batch}
    what |= {"bytes": moved, "flops": flops}
    for name, make in runs(op, size):
        row = what | {"implementation": name}
        try:
            seconds = timer(make())
        except Exception as error:
            first = str(error).strip().splitlines()[:1] or [type(error).__name__]
            yield row | {"error": first[0][:200]}
            continue
        yield row | {
            "us": seconds * 1e6,
            "GB/s": moved / seconds / 1e9,
            "TFLOP/s": flops / seconds / 1e12,
            "roof": roof.seconds(moved, flops) / seconds,
            "memory_bound": roof.memory_bound(moved, flops),
        }


def as_text(row: dict) -> str:
    where = f"{row['op']:15}{row['implementation']:12}"
    where += f"{row['model']:13} {row['rows']:4} rows {row['prefix']:7} cached  batch {row['batch']:2}"
    if "error" in row:
        return f"{where}  failed: {row['error']}"
    time = f"{row['us']:10.1f} us{row['bytes'] / 1e6:10.2f} MB"
    return f"{where}{time}{row['GB/s']:7.0f} GB/s{row['TFLOP/s']:7.1f} TFLOP/s{row['roof']:7.1%} of the roof"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="JSON lines, written as they come"
    )
    out = parser.parse_args().out
    torch.set_default_device("cuda")
    timer = ColdTimer()
    roof = Roof.measured(timer)
    room = MEMORY * torch.cuda.get_device_properties().total_memory
    with out.open("w") as file:
        print(json.dumps({"roof": vars(roof)}), file=file, flush=True)
        print(f"roof: {roof.bandwidth / 1e9:.0f} GB/s copied, {roof.peak / 1e12:.0f} TFLOP/s", flush=True)
        for op, size in sizes():
            if size.cache_bytes() > room:
                continue
            for row in measure(op, size, timer, roof):
                print(json.dumps(row), file=file, flush=True)
                print(as_text(row), flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
