"""The command line: `esp generate` decodes prompts, `esp calibrate` measures what drafts are worth.

Whatever needs torch is imported inside the commands, so that help and mistakes answer at once.
"""

import argparse
import contextlib
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TextIO

from esp_decode.bench import cells as bench_cells
from esp_decode.bench.ablations import ABLATIONS
from esp_decode.names import DRAFTERS, PROBES

EXAMPLES = """examples:
  esp generate --prompt "Why is the sky blue?"
  esp generate --prompt "Count to twenty." --compare
  esp generate --prompt-file questions.jsonl --tree static:15,4 --masks 2 --json > answers.jsonl
  esp generate --model Qwen/Qwen3-0.6B --device cuda --no-chat --prompt "def fib(n):"
"""
BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, 2 on bad input, 130 on Ctrl-C, 141 on a closed stdout."""
    out = sys.stdout
    try:
        _run(argv, out)
        out.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # the interpreter flushes once more at exit
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except ModuleNotFoundError as error:
        return _complain(f"{error.name} is not installed; pip install 'esp-kernels[decode]' brings it")
    except (ValueError, OSError) as error:
        return _complain(str(error))
    except MemoryError:
        return _complain("not enough memory")
    except RuntimeError as error:  # of PyTorch's allocators
        if "memory" not in str(error):
            raise
        return _complain(f"not enough memory: {error}")
    return 0


def _run(argv: Sequence[str] | None, out: TextIO) -> None:
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit:  # after --help
        return
    # A library that prints must not break into what is written to `out`.
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.showwarning = _show_warning  # type: ignore[assignment]
        arguments.command(arguments, out)


def _complain(sentence: str) -> int:
    print("esp:", " ".join(sentence.split()), file=sys.stderr)
    return BAD_INPUT


def _show_warning(message: Warning | str, *_: object) -> None:
    print("esp: warning:", message, file=sys.stderr)


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are ValueErrors, reported like any other bad input."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def _parser() -> Parser:
    parser = Parser(prog="esp", description="Training-free multi-token prediction with a frozen model.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_generate(
        commands.add_parser(
            "generate",
            help="decode prompts",
            description="Decode prompts, many tokens a forward; the text is printed as it is committed.",
            epilog=EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    sentence = "measure on your prompts what drafts are worth, and keep it as the model's profile"
    _add_calibrate(commands.add_parser("calibrate", help=sentence, description=f"{sentence.capitalize()}."))
    sentence = "measure drafters on your prompts against plain decoding: tau, speed, exactness"
    _add_bench(commands.add_parser("bench", help=sentence, description=f"{sentence.capitalize()}."))
    sentence = "repeat one of the paper's ablations on your prompts"
    _add_ablate(commands.add_parser("ablate", help=sentence, description=f"{sentence.capitalize()}."))
    sentence = "tell what this machine can run: versions, CPU, GPU, backends, the demo model"
    doctor = commands.add_parser("doctor", help=sentence, description=f"{sentence.capitalize()}.")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.set_defaults(command=_doctor)
    sentence = "predict a step's time on a GPU from data sheets: bytes and FLOPs of every op"
    _add_roofline(commands.add_parser("roofline", help=sentence, description=f"{sentence.capitalize()}."))
    return parser


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    def add(name: str, help: str, **kind: object) -> None:
        parser.add_argument(name, help=help, **kind)  # type: ignore[arg-type]

    flag = argparse.BooleanOptionalAction
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="the prompt")
    source.add_argument(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help="text, or JSON lines with turns, prompt or prompt_ids",
    )
    add("--model", "folder, hub id or .gguf file (default: %(default)s)", default="smollm2")
    add(
        "--drafter",
        "ar decodes plainly (default: joined; esp on a GPU, and with --masks or --tree)",
        choices=DRAFTERS,
    )
    add("--heads", "trained weights of drafters medusa and eagle2", metavar="FOLDER")
    add("--budget", "rows of a forward (default: by tree and device)", type=_count, metavar="BC")
    add("--masks", "mask rows of a node, of drafter esp (default: 1)", type=_count, metavar="K")
    add("--tree", "of drafter esp: dynamic (the default), or static:15,4 by widths")
    add("--prune", "draft no token twice in a row (default: on)", action=flag, default=True)
    probes = f"what masks start from: {', '.join(PROBES)} or a .safetensors file"
    add("--probe", f"{probes} (default: the profile's, else vocab-mean)", metavar="PROBE")
    add("--lam", "update rate of masks (default: 0.1 for probes that follow the text, else 0)", type=float)
    add("--profile", "what esp calibrate made for the model (default: the cached one)", metavar="FOLDER")
    add(
        "--max-new-tokens", "tokens to generate (default: %(default)s)", type=_count, default=256, metavar="N"
    )
    add("--dtype", "default: bfloat16 if native, else float32", choices=("float32", "bfloat16", "float16"))
    add("--device", "default: cuda where there is a card", choices=("cpu", "cuda"))
    add("--threads", "CPU threads (default: PyTorch's choice)", type=_count, metavar="N")
    add("--chat", "use the model's chat template (default: on)", action=flag, default=True)
    add("--compare", "decode plainly too: speed ratio, exact match", action="store_true")
    add("--json", "one JSON object a prompt on stdout, nothing else", action="store_true")
    parser.set_defaults(command=_generate)


def _generate(arguments: argparse.Namespace, out: TextIO) -> None:
    from esp_decode.generate import generate

    generate(arguments, out)


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    def add(name: str, help: str, **kind: object) -> None:
        parser.add_argument(name, help=help, **kind)  # type: ignore[arg-type]

    add("model", "folder, hub id, .gguf file or smollm2", metavar="MODEL")
    add("--prompts", "JSON lines with turns, prompt or prompt_ids", type=Path, required=True, metavar="FILE")
    add(
        "--out",
        "the profile's folder (default: the model's in the cache)",
        type=Path,
        metavar="FOLDER",
    )
    add("--tune", "optimise the vectors of the probe too", action="store_true")
    add("--seconds", "about how long it may take (default: as long as it takes)", type=_count, metavar="S")
    add(
        "--max-new-tokens",
        "tokens of an answer (default: %(default)s)",
        type=_count,
        default=100,
        metavar="N",
    )
    add("--dtype", "default: bfloat16 if native, else float32", choices=("float32", "bfloat16", "float16"))
    add("--device", "default: cuda where there is a card", choices=("cpu", "cuda"))
    add("--threads", "CPU threads (default: PyTorch's choice)", type=_count, metavar="N")
    parser.set_defaults(command=_calibrate)


def _calibrate(arguments: argparse.Namespace, out: TextIO) -> None:
    from esp_decode.calibrate.command import calibrate

    calibrate(arguments, out)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    drafters = ",".join(bench_cells.DEFAULT)
    parser.add_argument(
        "--drafters",
        metavar="A,B",
        default=drafters,
        help="with options as esp:masks=2:probe=last-k (default: %(default)s)",
    )
    _add_compared(parser, budgets="10,30,60")
    parser.set_defaults(command=_bench)


def _add_ablate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", choices=ABLATIONS, help=" or ".join(ABLATIONS), metavar="NAME")
    _add_compared(parser, budgets="30")
    parser.set_defaults(command=_ablate)


def _add_compared(parser: argparse.ArgumentParser, budgets: str) -> None:
    def add(name: str, help: str, **kind: object) -> None:
        parser.add_argument(name, help=help, **kind)  # type: ignore[arg-type]

    add("--model", "folder, hub id or .gguf file (default: %(default)s)", default="smollm2")
    add(
        "--prompts",
        "JSON lines of SpecBench, GSM8K, HumanEval or Dolly, or with prompt",
        type=Path,
        metavar="FILE",
        required=parser.prog.endswith("bench"),
    )
    add("--budgets", "rows of a forward (default: %(default)s)", type=_counts, default=budgets, metavar="N,N")
    add("--per-category", "only the first N questions of each category", type=_count, metavar="N")
    add(
        "--out",
        "results, tables and plots; an interrupted run goes on there (default: %(default)s)",
        type=Path,
        metavar="FOLDER",
        default=Path("bench-results"),
    )
    add("--max-new-tokens", "default: %(default)s", type=_count, default=100, metavar="N")
    add("--profile", "what esp calibrate made for the model (default: the cached one)", metavar="FOLDER")
    add("--dtype", "default: bfloat16 if native, else float32", choices=("float32", "bfloat16", "float16"))
    add("--device", "default: cuda where there is a card", choices=("cpu", "cuda"))
    add("--threads", "CPU threads (default: PyTorch's choice)", type=_count, metavar="N")


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _bench(arguments: argparse.Namespace, out: TextIO) -> None:
    from esp_decode.bench.command import bench

    bench(arguments, out)


def _ablate(arguments: argparse.Namespace, out: TextIO) -> None:
    from esp_decode.bench.command import ablate

    ablate(arguments, out)


def _doctor(arguments: argparse.Namespace, out: TextIO) -> None:
    from esp_decode import doctor

    found = doctor.examine()
    out.write(doctor.as_json(found) if arguments.json else doctor.as_text(found))


def _add_roofline(parser: argparse.ArgumentParser) -> None:
    from esp_decode.roofline import CARDS

    parser.add_argument(
        "--model", default="llama-3.1-8b", help="name, folder or hub id (default: %(default)s)"
    )
    parser.add_argument("--gpu", choices=tuple(CARDS), default="h100", help="default: %(default)s")
    parser.add_argument("--budget", type=_count, default=60, metavar="BC", help="rows (default: %(default)s)")
    parser.add_argument(
        "--prefix", type=_count, default=4096, metavar="N", help="cached tokens (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=_roofline)


def _roofline(arguments: argparse.Namespace, out: TextIO) -> None:
    from esp_decode import roofline

    shape, card = roofline.shape_of(arguments.model), roofline.CARDS[arguments.gpu]
    found = roofline.predict(shape, card, arguments.prefix, arguments.budget)
    if arguments.json:
        out.write(json.dumps({"model": arguments.model, **found}) + "\n")
    else:
        roofline.print_tables(arguments.model, found, out)
