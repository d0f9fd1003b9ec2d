"""The command line: `esp generate` decodes prompts, `esp doctor` tells what this machine can run.

Whatever needs torch is imported inside the commands, so that help and mistakes answer at once.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TextIO

EXAMPLES = """examples:
  esp generate --prompt "Why is the sky blue?"
  esp generate --prompt "Count to twenty." --compare
  esp generate --prompt-file questions.jsonl --masks 2 --tree static:15,4 --budget 60 --json > answers.jsonl
  esp generate --model Qwen/Qwen3-0.6B --device cuda --dtype bfloat16 --prompt "def fib(n):" --no-chat
"""
BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are ValueErrors, reported like any other bad input."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 2 on bad input, 130 on Ctrl-C, 141 on a closed stdout."""
    out = sys.stdout
    try:
        arguments = _parser().parse_args(argv)
        with contextlib.redirect_stdout(sys.stderr):  # a library that prints must not break into the output
            arguments.command(arguments, out)
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
    return 0


def _complain(sentence: str) -> int:
    print("esp:", " ".join(sentence.split()), file=sys.stderr)
    return BAD_INPUT


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def _parser() -> Parser:
    parser = Parser(prog="esp", description="Training-free multi-token prediction with a frozen model.")
    commands = parser.add_subparsers(required=True, metavar="generate|doctor")
    _add_generate(
        commands.add_parser(
            "generate",
            help="decode prompts",
            description="Decode prompts; the text is printed as it is committed.",
            epilog=EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    sentence = "Tell what this machine can run: versions, CPU, GPU, backends, the demo model."
    doctor = commands.add_parser("doctor", help="tell what this machine can run", description=sentence)
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.set_defaults(command=_doctor)
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    flag = argparse.BooleanOptionalAction
    add("--model", default="smollm2", metavar="smollm2|FOLDER|HUB_ID|FILE.gguf", help="default: %(default)s")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="the prompt")
    source.add_argument(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help="a text file (one prompt), or JSON lines with turns (the first is used), prompt or prompt_ids",
    )
    add("--drafter", choices=("esp", "ar"), default="esp", help="ar decodes plainly; default: %(default)s")
    add("--budget", type=_count, metavar="BC", help="rows in a forward; default: what suits the device")
    add("--masks", type=_count, default=1, metavar="K", help="mask rows a node; default: %(default)s")
    add("--tree", default="dynamic", metavar="dynamic|static:15,4", help="default: %(default)s")
    add("--prune", action=flag, default=True, help="no draft token equal to its parent; default: --prune")
    add(
        "--probe",
        choices=("prompt-mean", "vocab-mean", "last-k", "sample"),
        default="vocab-mean",
        help="what the mask embedding starts from; default: %(default)s",
    )
    add(
        "--lam",
        type=float,
        metavar="L",
        help="how fast it follows the output, 0 to 1; default: 0.1, 0 for vocab-mean",
    )
    add("--max-new-tokens", type=_count, default=256, metavar="N", help="default: %(default)s")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: what suits the device")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--threads", type=_count, metavar="N", help="CPU threads; default: PyTorch's own choice")
    add("--chat", action=flag, default=True, help="apply the model's chat template; default: --chat")
    add("--compare", action="store_true", help="decode plainly too; report speed ratio and exact match")
    add("--json", action="store_true", help="print one JSON object a prompt, and nothing else")
    parser.set_defaults(command=_generate)


def _generate(arguments: argparse.Namespace, out: TextIO) -> None:
    from esp_decode.generate import generate

    generate(arguments, out)


def _doctor(arguments: argparse.Namespace, out: TextIO) -> None:
    from esp_decode import doctor

    found = doctor.examine()
    out.write(doctor.as_json(found) if arguments.json else doctor.as_text(found))
