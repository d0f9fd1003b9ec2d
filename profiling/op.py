"""One op at a size on a CUDA card, a few calls between the profiler's start and stop, for `profiling.ncu`.

python -m profiling.op tree_attention --rows 60 --prefix 32768
"""

import argparse
import sys

import torch

from bench import cases
from bench.cases import Size
from esp_decode.roofline import MODELS
from esp_kernels import _backend

WARM_UP = 3


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m profiling.op", description=__doc__.splitlines()[0])
    parser.add_argument("op", choices=cases.OPS)
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b", help="whose sizes")
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--prefix", type=int, default=4096, help="cached tokens")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--backend", choices=("triton", "cuda"), default="triton")
    parser.add_argument("--calls", type=int, default=3)
    return parser


def main(words: list[str] | None = None) -> int:
    parser = arguments()
    options = parser.parse_args(words)
    for name in ("rows", "batch", "calls"):
        if getattr(options, name) < 1:
            parser.error(f"{name} must be at least 1, got {getattr(options, name)}")
    if options.prefix < 0:
        parser.error(f"prefix must be at least 0, got {options.prefix}")
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA card, and torch finds none")
    reason = _backend.why_not(options.op, options.backend, "cuda")
    if reason is not None:
        parser.error(f"backend {options.backend!r} cannot serve {options.op}: {reason}")
    torch.set_default_device("cuda")
    run = cases.OPS[options.op](
        Size.of(options.model, options.rows, options.prefix, options.batch), options.backend
    )
    for _ in range(WARM_UP):
        run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for _ in range(options.calls):
        run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
