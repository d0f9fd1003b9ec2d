"""What a decoded prompt is reported as: one JSON object, and one row of the table that compares."""

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from esp_decode.decoder import Decoder, Generation

    Pair = tuple[Generation, Generation]
    """The same prompt decoded with drafts and plainly."""


def record(decoder: "Decoder", generation: "Generation", plain: "Generation | None" = None) -> str:
    """One line of JSON; plain decoding is a budget of one row without masks, probe or tree.

    With `plain`, the same prompt decoded without drafts, also exact, speedup (plain wall time over this one,
    prefill and decode) and ar_tokens_per_second.
    """
    options, shape = decoder.options, decoder.options.shape
    entry: dict[str, Any] = {
        "prompt_ids": generation.prompt_ids,
        "output_ids": generation.output_ids,
        "text": generation.text,
        "new_tokens": generation.new_tokens,
        "decode_calls": generation.decode_calls,
        "tau": generation.tau,
        "prefill_seconds": generation.prefill_seconds,
        "decode_seconds": generation.decode_seconds,
        "tokens_per_second": generation.tokens_per_second,
        "drafter": options.drafter,
        "budget": options.budget,
        "masks": options.masks,
        "probe": options.probe.kind if options.masks else None,
        "tree": str(shape) if shape else None,
        "dtype": decoder.dtype,
        "device": decoder.device,
        "model": decoder.model_name,
    }
    if plain is not None:
        entry["exact"] = exact(generation, plain)
        entry["speedup"] = speedup([(generation, plain)])
        entry["ar_tokens_per_second"] = plain.tokens_per_second
    return json.dumps(entry, allow_nan=False) + "\n"


def exact(generation: "Generation", plain: "Generation") -> bool:
    return generation.output_ids == plain.output_ids


def speedup(pairs: "Sequence[Pair]") -> float:
    """S/R: the plain wall time over the one with drafts, prefill and decode, all prompts together."""
    return _seconds(plain for _, plain in pairs) / _seconds(generation for generation, _ in pairs)


def _seconds(generations: "Iterable[Generation]") -> float:
    return sum(g.prefill_seconds + g.decode_seconds for g in generations)


def _ratio(decoded: int, per: float, places: int) -> str:
    return f"{decoded / per:.{places}f}" if decoded else "-"


def _row(name: str, pairs: "Sequence[Pair]") -> list[str]:
    drafted, plain = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    same = sum(exact(*pair) for pair in pairs)
    return [
        name,
        str(sum(g.new_tokens for g in drafted)),
        _ratio(_decoded(drafted), sum(g.decode_calls for g in drafted), 2),
        _ratio(_decoded(drafted), sum(g.decode_seconds for g in drafted), 1),
        _ratio(_decoded(plain), sum(g.decode_seconds for g in plain), 1),
        f"{speedup(pairs):.2f}x",
        f"{same} of {len(pairs)}" if len(pairs) > 1 else "yes" if same else "NO",
    ]


def _decoded(generations: "Sequence[Generation]") -> int:
    """Tokens that decode calls committed; the first of each prompt is prefill's."""
    return sum(g.new_tokens - 1 for g in generations)


def print_comparison(decoder: "Decoder", pairs: "Sequence[Pair]", out: TextIO) -> None:
    """A table with a row a prompt, the total where there are several, and what went worse than plainly."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    options, shape = decoder.options, decoder.options.shape
    draft = "" if options.drafter == "ar" else f", budget {options.budget}"
    if shape is not None:
        draft = f", tree {shape}{draft}, masks {options.masks}"
    setting = f"{decoder.model_name}, {decoder.dtype} on {decoder.device}, {options.drafter}{draft}"
    table = Table(title=escape(setting))
    for column in ("prompt", "tokens", "tau", "tokens/s", "plain tokens/s", "S/R", "exact"):
        table.add_column(column, justify="right")
    for number, pair in enumerate(pairs, 1):
        table.add_row(*_row(str(number), [pair]), end_section=number == len(pairs))
    if len(pairs) > 1:
        table.add_row(*_row("total", pairs))
    console = Console(file=out, highlight=False)
    console.print()
    console.print(table)
    for verdict, count in (
        ("Decoding with drafts was slower than plain decoding", sum(speedup([pair]) < 1 for pair in pairs)),
        ("The output differs from that of plain decoding", sum(not exact(*pair) for pair in pairs)),
    ):
        if count:
            console.print(verdict + (f" on {count} of {len(pairs)} prompts." if len(pairs) > 1 else "."))
