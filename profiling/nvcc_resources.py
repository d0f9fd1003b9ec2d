"""What nvcc makes of the CUDA kernels on each architecture: registers, stack, spills, static shared memory,
and how many wgmma and asynchronous instructions, by the nvdisasm that comes with Triton.

    python -m profiling.nvcc_resources            # compares with profiling/resources/nvcc-<version>.txt
    python -m profiling.nvcc_resources --update   # writes it

A kernel that spills or keeps a stack fails, and so does a difference from the file of this nvcc. Without nvcc
there is nothing to compare; with an nvcc that has no file only spills and stacks fail.
"""

import argparse
import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from profiling.resources import INSTRUCTIONS, NAME, tool

ROOT = Path(__file__).parents[1]
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")

COUNTED = ("wgmma", "async")  # of profiling.resources.INSTRUCTIONS

ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


def find_nvcc() -> str | None:
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    return shutil.which("nvcc", path=home / "bin") or shutil.which("nvcc")


def release(nvcc: str) -> str:
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+\.\d+)", said)
    assert found is not None, said
    return found[1]


def compile_verbosely(nvcc: str, source: Path, architecture: str) -> tuple[str, str]:
    """What ptxas says, and the machine code."""
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, "-std=c++20", "-O3", "-cubin", f"-arch={architecture}", "-Xptxas=-v"]
        command += [f"-I{ROOT / 'csrc/include'}", f"-I{ROOT / 'csrc'}", str(source), "-o", f"{folder}/cubin"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(done.stderr)
        return done.stderr + done.stdout, tool("nvdisasm", "-c", f"{folder}/cubin")


def instructions(code: str) -> dict[str, str]:
    """By the kernels' mangled names."""
    _, *parts = re.split(r"^//-+ \.text\.(\w+)", code, flags=re.MULTILINE)
    found = {}
    for symbol, text in zip(parts[::2], parts[1::2], strict=True):
        names = NAME.findall(text)
        counts = {kind: sum(bool(re.match(INSTRUCTIONS[kind], n)) for n in names) for kind in COUNTED}
        found[symbol] = "".join(f"  {kind} {count}" for kind, count in counts.items())
    return found


def kernel_name(symbol: str) -> str:
    """advance_block_kernel<bf16, 4> from its mangled name."""
    plain = subprocess.run(["c++filt", symbol], capture_output=True, text=True, check=True).stdout
    return plain.replace("esp::", "").partition("(")[0].removeprefix("void ").strip()


def report(nvcc: str) -> tuple[list[str], list[str]]:
    """Lines, sorted, and those of kernels that spill or keep a stack."""
    lines, wrong = [], []
    for source in sorted((ROOT / "csrc/cuda").glob("*.cu")):
        for architecture in ARCHITECTURES:
            name, counted, stack = "", "", ["0", "0", "0"]
            output, code = compile_verbosely(nvcc, source, architecture)
            counts = instructions(code)
            for said in output.splitlines():
                if entry := ENTRY.search(said):
                    name, counted = kernel_name(entry[1]), counts[entry[1]]
                elif found := STACK.search(said):
                    stack = list(found.groups())
                elif used := USED.search(said):
                    what = f"registers {used[1]:>3}  stack {stack[0]}  spills {int(stack[1]) + int(stack[2])}"
                    lines.append(f"{architecture:<8} {name:<47} {what}  shared {used[2] or 0}{counted}")
                    if stack != ["0", "0", "0"]:
                        wrong.append(lines[-1])
    return sorted(lines), wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the file")
    update = parser.parse_args().update
    nvcc = find_nvcc()
    if nvcc is None:
        print("no nvcc: the CUDA kernels are not compiled")
        return 0
    lines, wrong = report(nvcc)
    text = "\n".join(lines) + "\n"
    path = ROOT / "profiling" / "resources" / f"nvcc-{release(nvcc)}.txt"
    for line in wrong:
        print(f"spills or a stack: {line}")
    if update:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    elif path.exists():
        old = path.read_text().splitlines()
        different = list(difflib.unified_diff(old, lines, str(path.relative_to(ROOT)), "now", lineterm=""))
        print("\n".join(different) or f"{len(lines)} kernels as in {path.relative_to(ROOT)}")
        return int(bool(different or wrong))
    else:
        print(f"no {path.relative_to(ROOT)} to compare with\n{text}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
