"""Nsight Systems on decode steps: the timeline, and each op's share of the GPU's time.

python -m profiling.nsys --budget 60                      # profiling/step.py's options
python -m profiling.nsys --print --budget 60 --graph      # the command lines alone
"""

import argparse
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from profiling import summarise

STEP = Path(__file__).with_name("step.py")


def commands(out: Path, words: list[str]) -> tuple[list[str], list[str]]:
    """To record, and to count; `out` has no suffix."""
    record = [
        "nsys", "profile",
        "--trace=cuda,nvtx,cublas", "--cuda-graph-trace=node", "--sample=none", "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi", "--capture-range-end=stop",
        "--force-overwrite=true", "--output", str(out),
        sys.executable, str(STEP), "--device", "cuda", "--external", *words,
    ]  # fmt: skip
    count = ["nsys", "stats", "--report", "cuda_gpu_kern_sum", "--format", "csv", "--force-export=true"]
    return record, [*count, f"{out}.nsys-rep"]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.nsys",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--print", action="store_true", help="print the command lines and run nothing")
    parser.add_argument(
        "--out", type=Path, default=Path("step"), help="the report, without its suffix (step)"
    )
    options, rest = parser.parse_known_args(words)
    record, count = commands(options.out, rest)
    table = Path(f"{options.out}.csv")
    if options.print:
        print(shlex.join(record))
        print(f"{shlex.join(count)} > {shlex.quote(str(table))}")
        return 0
    if shutil.which("nsys") is None:
        parser.error("nsys (Nsight Systems) is not on PATH")
    for command in (record, count):
        done = subprocess.run(command, stdout=subprocess.PIPE if command is count else None, text=True)
        if done.returncode != 0:
            print(f"{' '.join(command[:2])} ended with status {done.returncode}", file=sys.stderr)
            return 2
    table.write_text(done.stdout)
    return summarise.main([str(table)])


if __name__ == "__main__":
    sys.exit(main())
