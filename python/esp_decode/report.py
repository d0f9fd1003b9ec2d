"""What a decoded prompt is reported as: one JSON object, and one row of the table that compares."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from esp_decode.decoder import Decoder, Generation

    Pair = tuple[Generation, Generation]
    """The same prompt decoded with drafts and plainly."""


def record(decoder: "Decoder", generation: "Generation", plain: "Generation | None" = None) -> str:
    """One line of JSON; a rate that has no value (no decode call was needed) is null.

    With `plain`, the same prompt decoded without drafts, also exact, speedup (plain wall time over this one,
    prefill and decode) and ar_tokens_per_second.
    """
    entry: dict[str, Any] = {
        "prompt_ids": list(generation.prompt_ids),
        "output_ids": list(generation.output_ids),
        "text": generation.text,
        "new_tokens": generation.new_tokens,
        "decode_calls": generation.decode_calls,
        "tau": generation.tau,
        "prefill_seconds": generation.prefill_seconds,
        "decode_seconds": generation.decode_seconds,
        "tokens_per_second": generation.tokens_per_second,
        "drafter": decoder.drafter,
        "budget": decoder.budget,
        "masks": decoder.masks,
        "probe": decoder.probe,
        "tree": decoder.tree,
        "dtype": decoder.dtype,
        "device": decoder.device,
        "model": decoder.model_name,
    }
    if plain is not None:
        entry["exact"] = exact(generation, plain)
        entry["speedup"] = speedup([(generation, plain)])
        entry["ar_tokens_per_second"] = plain.tokens_per_second
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in entry.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def exact(generation: "Generation", plain: "Generation") -> bool:
    return list(generation.output_ids) == list(plain.output_ids)


def speedup(pairs: "Sequence[Pair]") -> float:
    """S/R: the plain wall time over the one with drafts, prefill and decode, all prompts together."""
    return _seconds(plain for _, plain in pairs) / _seconds(generation for generation, _ in pairs)


def _seconds(generations: "Iterable[Generation]") -> float:
    return sum(g.prefill_seconds + g.decode_seconds for g in generations)


def _tau(generations: "Sequence[Generation]") -> float:
    called = [g for g in generations if g.decode_calls]
    calls = sum(g.decode_calls for g in called)
    return sum(g.tau * g.decode_calls for g in called) / calls if calls else math.nan


def _rate(generations: "Sequence[Generation]") -> float:
    timed = [g for g in generations if g.decode_calls]
    seconds = sum(g.decode_seconds for g in timed)
    return sum(g.tokens_per_second * g.decode_seconds for g in timed) / seconds if seconds else math.nan


def _cell(value: float, places: int) -> str:
    return f"{value:.{places}f}" if math.isfinite(value) else "-"


def _row(name: str, pairs: "Sequence[Pair]") -> list[str]:
    drafted, plain = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    same = sum(exact(*pair) for pair in pairs)
    return [
        name,
        str(sum(g.new_tokens for g in drafted)),
        _cell(_tau(drafted), 2),
        _cell(_rate(drafted), 1),
        _cell(_rate(plain), 1),
        f"{speedup(pairs):.2f}x",
        f"{same} of {len(pairs)}" if len(pairs) > 1 else "yes" if same else "NO",
    ]


def print_comparison(decoder: "Decoder", pairs: "Sequence[Pair]", out: TextIO) -> None:
    """A table with a row a prompt, the total where there are several, and what went worse than plainly."""
    from rich.console import Console
    from rich.table import Table

    setting = f"{decoder.model_name}, {decoder.dtype} on {decoder.device}, {decoder.drafter}"
    table = Table(title=f"{setting}: budget {decoder.budget}, masks {decoder.masks}")
    for column in ("prompt", "tokens", "tau", "tokens/s", "plain tokens/s", "S/R", "exact"):
        table.add_column(column, justify="right")
    for number, pair in enumerate(pairs, 1):
        table.add_row(*_row(str(number), [pair]), end_section=number == len(pairs))
    if len(pairs) > 1:
        table.add_row(*_row("total", pairs))
    console = Console(file=out, highlight=False)
    console.print()
    console.print(table)
    for sentence in _confessions(pairs):
        console.print(sentence)


def _confessions(pairs: "Sequence[Pair]") -> Iterator[str]:
    slower = sum(speedup([pair]) < 1 for pair in pairs)
    different = sum(not exact(*pair) for pair in pairs)
    if slower:
        yield f"Decoding with drafts was slower than plain decoding on {slower} of {len(pairs)} prompts."
    if different:
        yield f"The output differs from that of plain decoding on {different} of {len(pairs)} prompts."
