"""Everything that a CUDA card can say, in one command: `make gpu-check` (python -m bench.gpu_check).

Builds the CUDA kernels, runs the tests natively, compute-sanitizer on small cases, compares the bits of plain
and tree decoding, and measures the ops and the step. Each part is a process of its own with a limit: one that
fails or takes too long does not lose the rest, and bench/results/<card>-<date>.json is written after each.
Needs torch, triton and pytest as they are installed, nvcc for the CUDA C++ kernels, and no network.
"""

import argparse
import datetime
import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu.targets import targets

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
OUT = "OUT"
KEPT_LINES = 25  # of what a failed part printed


@dataclass(frozen=True)
class Part:
    """seconds  its limit
    command  in which OUT stands for a file of its results: JSON lines, read however it ends
    lacking  why it cannot run here
    """

    name: str
    command: list[str]
    seconds: int
    environment: dict[str, str]
    lacking: str | None = None


def cuda_tool(name: str) -> str | None:
    """Of the CUDA toolkit: in CUDA_HOME (/usr/local/cuda) or on PATH."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    return shutil.which(name, path=str(home / "bin")) or shutil.which(name)


def parts() -> list[Part]:
    """In the order of their runs; the limits add up to nine minutes."""
    python, sanitizer = [sys.executable], cuda_tool("compute-sanitizer")
    workers = ["-n", "8", "--dist", "worksteal"] if importlib.util.find_spec("xdist") else []
    has_pytest = importlib.util.find_spec("pytest") is not None
    no_sanitizer = None if sanitizer else "compute-sanitizer is not in CUDA_HOME/bin nor on PATH"
    built = {"ESP_BUILD_CPU": "1", "ESP_BUILD_CUDA": "1" if cuda_tool("nvcc") else "0"}

    def module(name: str) -> list[str]:
        return [*python, "-m", f"bench.gpu.{name}", "--out", OUT]

    def sanitized(tool: str) -> list[str]:
        command = [
            str(sanitizer),
            "--tool",
            tool,
            "--error-exitcode",
            "3",
            "--kernel-name-exclude",
            "kns=at::",
        ]
        return [*command, *python, "-m", "bench.gpu.small"]

    return [
        Part("build", [*python, "setup.py", "--quiet", "build_ext", "--inplace"], 90, built),
        Part(
            "tests",
            [*python, "-m", "pytest", "tests/ops", "tests/decode", "--maxfail=40", "--tb=short", *workers],
            180,
            {"ESP_TEST_DEVICE": "cuda"},
            None if has_pytest else "pytest is not installed",
        ),
        Part("memcheck", sanitized("memcheck"), 30, {}, no_sanitizer),
        Part("racecheck", sanitized("racecheck"), 30, {}, no_sanitizer),
        Part("bits", module("bits"), 100, {}),
        Part("step", module("step"), 35, {}),
        Part("ops", module("ops"), 75, {}),
    ]


def run(part: Part) -> dict[str, Any]:
    """What became of a part. Prints as it goes; the end of what it printed is kept when it failed."""
    if part.lacking is not None:
        return {"ok": None, "said": part.lacking}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        paths = os.pathsep.join([str(ROOT), str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
        process = subprocess.Popen(
            [str(out) if word == OUT else word for word in part.command],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": paths} | part.environment,
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        limit = threading.Timer(part.seconds, os.killpg, (process.pid, signal.SIGKILL))
        limit.start()
        lines: list[str] = []
        try:
            for line in process.stdout or ():
                print(f"  {line}", end="", flush=True)
                lines.append(line.rstrip())
            status = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            limit.cancel()
        spent = time.monotonic() - started
        result: dict[str, Any] = {"ok": status == 0, "seconds": round(spent, 1)}
        if status != 0:
            last = "\n".join(lines[-KEPT_LINES:])
            stopped = status == -signal.SIGKILL and spent >= part.seconds
            result["said"] = f"stopped at its limit of {part.seconds} s\n{last}" if stopped else last
        if out.exists():
            whole = [line for line in out.read_text().splitlines(keepends=True) if line.endswith("\n")]
            result["results"] = [json.loads(line) for line in whole]
        return result


def output(*command: str) -> str | None:
    """The first line that a program prints, None without the program."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return (done.stdout.splitlines() or [None])[0]


def machine() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties()
    return {
        "card": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__,
        "python": platform.python_version(),
        "commit": output("git", "describe", "--always", "--dirty"),
        "date": datetime.date.today().isoformat(),
    }


def judged(done: dict[str, Any]) -> list[str]:
    """The targets, a line each."""
    measured = done.get("ops", {}).get("results", [])
    roof = next((row["roof"] for row in measured if "roof" in row and "op" not in row), None)
    rows = [row for row in measured if "op" in row]
    steps = done.get("step", {}).get("results", [])
    return [str(target) for target in targets(rows, roof, steps, done.get("bits", {}).get("ok"))]


def main(arguments: list[str] | None = None) -> int:
    names = [part.name for part in parts()]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"some of {', '.join(names)}; all by default"
    )
    chosen = parser.parse_args(arguments).parts or names
    unknown = next((name for name in chosen if name not in names), None)
    if unknown is not None:
        parser.error(f"PART must be one of {', '.join(names)}, got {unknown!r}")
    if not torch.cuda.is_available():
        print("gpu-check needs a CUDA card, and torch finds none", file=sys.stderr)
        return 2
    found = {"machine": machine(), "parts": {}, "targets": []}
    card = re.sub(r"\W+", "-", found["machine"]["card"].lower())
    path = RESULTS / f"{card}-{found['machine']['date']}.json"
    RESULTS.mkdir(exist_ok=True)
    for part in parts():
        if part.name not in chosen:
            continue
        print(f"{part.name}:", flush=True)
        found["parts"][part.name] = run(part)
        found["targets"] = judged(found["parts"])
        path.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["machine"]))
    for name, result in found["parts"].items():
        verdict = {True: "passed", False: "FAILED", None: "not run"}[result["ok"]]
        why = result.get("said", "").partition("\n")[0]
        print(f"{name:10}{verdict:8}{result.get('seconds', ''):>7} {why}")
    print("\n".join(found["targets"]))
    print(path)
    return 0 if all(result["ok"] is not False for result in found["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
