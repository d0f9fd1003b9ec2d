"""The command `esp generate`."""

import argparse
import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING, TextIO

from esp_decode import prompts
from esp_decode.prompts import Prompt

if TYPE_CHECKING:
    from esp_decode.decoder import Decoder, Generation

    Stream = Generator[str, None, Generation]

DRAFT_OPTIONS = ("drafter", "budget", "masks", "tree", "prune", "probe", "lam", "heads")
MODEL_OPTIONS = ("dtype", "device", "threads", "profile")


def generate(arguments: argparse.Namespace, out: TextIO) -> None:
    """Decode every prompt, in order, and write to `out` what was asked for. ValueError on bad input."""
    if arguments.prompt_file is None:
        queue = [prompts.from_text(arguments.prompt)]
    else:
        queue = prompts.from_file(arguments.prompt_file)
    from esp_decode import Decoder, report

    options = {name: getattr(arguments, name) for name in DRAFT_OPTIONS + MODEL_OPTIONS}
    decoder = Decoder.from_pretrained(arguments.model, **options)
    plain = decoder.with_drafter("ar") if arguments.compare else None
    streams = [_start(decoder, prompt, arguments) for prompt in queue]
    if plain is not None:  # neither pays for the other's first use of the memory
        for one in (decoder, plain):
            one.generate(queue[0].content, max_new_tokens=8, chat=arguments.chat)
    pairs = []
    with contextlib.closing(_with_progress(streams, out)) as pending:
        for stream in pending:
            generation = _drain(stream, None if arguments.json else out)
            reference = None
            if plain is not None:
                reference = plain.generate(generation.prompt_ids, max_new_tokens=arguments.max_new_tokens)
                pairs.append((generation, reference))
            if arguments.json:
                out.write(report.record(decoder, generation, reference))
                out.flush()
    if pairs and not arguments.json:
        report.print_comparison(decoder, pairs, out)


def _start(decoder: "Decoder", prompt: Prompt, arguments: argparse.Namespace) -> "Stream":
    """The stream of a prompt, which the decoder judges now: all are judged before one is decoded."""
    try:
        return decoder.stream(prompt.content, max_new_tokens=arguments.max_new_tokens, chat=arguments.chat)
    except ValueError as error:
        raise ValueError(f"{prompt.where}{error}") from error


def _drain(stream: "Stream", out: TextIO | None) -> "Generation":
    """Decode to the end; the text goes to `out` as it is committed."""
    while True:
        try:
            piece = next(stream)
        except StopIteration as end:
            if out is not None:
                out.write("\n")
                out.flush()
            return end.value
        if out is not None:
            out.write(piece)
            out.flush()


def _with_progress(streams: "list[Stream]", out: TextIO) -> "Generator[Stream, None, None]":
    """The streams in order; on stderr how far we are, when there are several."""
    if len(streams) == 1:
        yield from streams
        return
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    if out.isatty():  # a bar that stays at the bottom and streaming text cannot share a terminal
        for number, stream in enumerate(streams, 1):
            console.rule(f"prompt {number} of {len(streams)}")
            yield stream
    else:
        yield from track(streams, "decoding", console=console, auto_refresh=False)
