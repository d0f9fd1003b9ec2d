"""A step on paper: the least bytes and FLOPs of every op, and the time that a card cannot go below.

An op takes the longer of its bytes over the card's bandwidth and its FLOPs over the card's peak, and each
launch a gap. Nothing here was measured: it says what to aim at, and which budget could pay.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

BUDGETS = (10, 30, 60, 120)
PREFIXES = (128, 1024, 4096, 16384, 32768, 131072)
ELEMENT = 2  # bytes of a bfloat16
GAP = 1e-6  # seconds a launch within a CUDA graph: an assumption, to be measured


@dataclass(frozen=True)
class Card:
    """Memory bandwidth in bytes/s and dense bfloat16 peak in FLOP/s, of NVIDIA's data sheets (SXM)."""

    name: str
    bandwidth: float
    peak: float


CARDS = {
    "a100": Card("A100 80GB", 2.039e12, 312e12),
    "h100": Card("H100", 3.35e12, 989e12),
    "h200": Card("H200", 4.8e12, 989e12),
    "b200": Card("B200", 8.0e12, 2250e12),
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama-family model, by their names in transformers' configs."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def of(cls, config: Any) -> "Shape":
        """Raises ValueError on a config that lacks a size."""
        sizes: dict[str, Any] = {name: getattr(config, name, None) for name in cls.__dataclass_fields__}
        if sizes["head_dim"] is None and sizes["hidden_size"] and sizes["num_attention_heads"]:
            sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
        lacking = [name for name, size in sizes.items() if not size]
        if lacking:
            raise ValueError(f"the model's config lacks {', '.join(lacking)}")
        return cls(**sizes)


MODELS = {  # their published configs
    "smollm2": Shape(30, 576, 1536, 9, 3, 64, 49152),
    "llama-3.2-3b": Shape(28, 3072, 8192, 24, 8, 128, 128256),
    "llama-3.1-8b": Shape(32, 4096, 14336, 32, 8, 128, 128256),
    "qwen3-8b": Shape(36, 4096, 12288, 32, 8, 128, 151936),
    "qwen3-32b": Shape(64, 5120, 25600, 64, 8, 128, 151936),
}


@dataclass(frozen=True)
class Cost:
    """One op's share of a step: calls, and bytes and FLOPs of all calls together."""

    op: str
    calls: int
    bytes: int
    flops: int

    def seconds(self, card: Card) -> float:
        return max(self.bytes / card.bandwidth, self.flops / card.peak) + self.calls * GAP

    @property
    def is_product(self) -> bool:
        return self.op.startswith("linear")


def step_costs(shape: Shape, rows: int, prefix: int, candidates: int = 1) -> list[Cost]:
    """The ops of one decode call of `rows` rows behind `prefix` cached tokens: one sequence, in bfloat16.

    Inputs and outputs count once, in-place ones twice; of caches and tables only what is read or written.
    """
    layers, hidden, inner = shape.num_hidden_layers, shape.hidden_size, shape.intermediate_size
    q, kv = (n * shape.head_dim for n in (shape.num_attention_heads, shape.num_key_value_heads))
    index = 4 * rows  # bytes of an int32 a row

    def linear(name: str, calls: int, inputs: int, outputs: int) -> Cost:
        elements = inputs * outputs + rows * (inputs + outputs)
        return Cost(f"linear {name}", calls, calls * ELEMENT * elements, calls * 2 * rows * inputs * outputs)

    def norm(calls: int, passes: int) -> Cost:
        size = ELEMENT * hidden * (passes * rows + 1)
        return Cost("rms_norm", calls, calls * size, calls * 4 * rows * hidden)

    seen = prefix + rows
    ancestors = 8 * rows * -(-rows // 64)
    attention = ELEMENT * (2 * seen * kv + 2 * rows * q) + 4 * rows * shape.num_attention_heads
    attention += ancestors + index
    rope = ELEMENT * (2 * rows * q + 4 * rows * kv) + 4 * rows * shape.head_dim + index
    return [
        Cost("embed_block", 1, 2 * ELEMENT * rows * hidden + 2 * index, 0),
        norm(1, 2),
        norm(2 * layers, 4),  # with the residual, read and written
        linear("qkv", layers, hidden, q + 2 * kv),
        Cost("rope_append", layers, layers * rope, layers * 3 * rows * (q + kv)),
        Cost("tree_attention", layers, layers * attention, layers * 4 * rows * seen * q),
        linear("output", layers, q, hidden),
        linear("gate, up", layers, hidden, 2 * inner),
        Cost("swiglu", layers, layers * 3 * ELEMENT * rows * inner, layers * 4 * rows * inner),
        linear("down", layers, inner, hidden),
        linear("LM head", 1, hidden, shape.vocab_size),
        Cost("topk_logprobs", 1, ELEMENT * rows * shape.vocab_size + 8 * rows * candidates,
             4 * rows * shape.vocab_size),
        Cost("advance_block", 1, 8 * rows * candidates + 2 * (4 * index + ancestors) + 2 * index, 0),
        Cost("commit_kv", 1, 4 * ELEMENT * layers * kv, 0),
    ]  # fmt: skip


def step_seconds(shape: Shape, card: Card, rows: int, prefix: int) -> float:
    return sum(cost.seconds(card) for cost in step_costs(shape, rows, prefix, max(1, rows // 2)))


def predict(shape: Shape, card: Card, prefix: int, budget: int) -> dict[str, Any]:
    """All that `esp roofline --json` prints of a model and a card."""
    costs = step_costs(shape, budget, prefix, max(1, budget // 2))
    total = sum(cost.seconds(card) for cost in costs)
    plain = {p: step_seconds(shape, card, 1, p) for p in PREFIXES}
    return {
        "gpu": card.name,
        "prefix": prefix,
        "budget": budget,
        "step_seconds": total,
        "outside_products": sum(c.seconds(card) for c in costs if not c.is_product) / total,
        "ops": [vars(cost) | {"seconds": cost.seconds(card)} for cost in costs],
        "plain_seconds": plain,
        "ratio": {b: {p: step_seconds(shape, card, b, p) / plain[p] for p in PREFIXES} for b in BUDGETS},
    }


def shape_of(model: str) -> Shape:
    """Of a built-in name, a folder or a hub id. Raises ValueError when there is none."""
    if model.lower() in MODELS:
        return MODELS[model.lower()]
    from transformers import AutoConfig

    try:
        return Shape.of(AutoConfig.from_pretrained(model))
    except (OSError, ValueError) as error:
        known = ", ".join(MODELS)
        raise ValueError(f"model must be {known}, or a folder or hub id, got {model!r}: {error}") from error


def print_tables(model: str, found: dict[str, Any], out: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table

    def table(title: str, *columns: str) -> Table:
        made = Table(title=title)
        for column in columns:
            made.add_column(column, justify="right")
        return made

    tokens: Callable[[int], str] = "{:,}".format
    title = f"{model} on {found['gpu']}, {found['budget']} rows behind {tokens(found['prefix'])} tokens"
    ops = table(title, "op", "calls", "MB", "GFLOP", "us", "share")
    for op in found["ops"]:
        share = op["seconds"] / found["step_seconds"]
        ops.add_row(op["op"], str(op["calls"]), f"{op['bytes'] / 1e6:,.2f}", f"{op['flops'] / 1e9:,.2f}",
                    f"{op['seconds'] * 1e6:,.1f}", f"{share:.1%}")  # fmt: skip
    ratio = table("step over plain step: tau must be above it", "rows", *map(tokens, PREFIXES))
    ratio.add_row("1, ms", *(f"{seconds * 1e3:.2f}" for seconds in found["plain_seconds"].values()))
    for budget, row in found["ratio"].items():
        ratio.add_row(str(budget), *(f"{value:.2f}" for value in row.values()))
    console = Console(file=out, highlight=False)
    console.print(ops)
    console.print(
        f"all {found['step_seconds'] * 1e6:,.0f} us, {found['outside_products']:.1%} outside the products"
    )
    console.print(ratio)
    console.print(f"Predicted from data sheets and {GAP * 1e6:.0f} us a launch, not measured.")
