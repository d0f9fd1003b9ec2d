"""Kernels made wrong on purpose, which the op tests must notice.

Each compiles and runs the op tests anew, so `make test` takes a dropped barrier and an off-by-one, and
`make mutants` (ESP_MUTANTS=all) takes all.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from . import build

ADVANCE, COMMIT = "include/esp/advance_block.cuh", "include/esp/commit_kv.cuh"
MUTANTS = [  # file, old text, new text
    (ADVANCE, "  read_block(a, b, s);\n  __syncthreads();", "  read_block(a, b, s);"),
    (ADVANCE, "if (warp_index() == 0) walk(s);\n  __syncthreads();", "if (warp_index() == 0) walk(s);"),
    (ADVANCE, "  }\n  __syncthreads();\n  write_block", "  }\n  write_block"),
    (ADVANCE, "rank + 1 : 0, prune);\n    __syncwarp();", "rank + 1 : 0, prune);"),
    (ADVANCE, "__ffs(int(found)) - 1", "__ffs(int(found))"),
    (ADVANCE, "here > place", "here < place"),
    (ADVANCE, "c <= accepted", "c < accepted"),
    (ADVANCE, "a.nodes + deepest * a.masks + level", "a.nodes + deepest * a.masks"),
    (COMMIT, "row <= moves", "row < moves"),
    (COMMIT, "column >= target", "column + 1 >= target"),
    (COMMIT, "if (to[i]) *to[i]", "if (to[i] && i > 0) *to[i]"),
    (COMMIT, "to[i] = from ? at(row)", "to[i] = from ? at(row + 1)"),
]  # fmt: skip
SHORT = [MUTANTS[0], next(mutant for mutant in MUTANTS if mutant[0] == COMMIT)]

ALL = os.environ.get("ESP_MUTANTS") == "all"

pytestmark = pytest.mark.skipif(build.load() is None, reason="no C++ compiler to emulate CUDA with")


@pytest.mark.parametrize(("file", "old", "new"), MUTANTS if ALL else SHORT)
def test_a_mutant_is_caught(file: str, old: str, new: str, tmp_path: Path):
    csrc = tmp_path / "csrc"
    shutil.copytree(build.CSRC, csrc)
    text = (csrc / file).read_text()
    assert text.count(old) == 1
    (csrc / file).write_text(text.replace(old, new))

    op = Path(file).stem
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-k",
            "cuda",
            "-p",
            "no:cacheprovider",
            f"tests/ops/test_{op}.py",
        ],
        env=os.environ | {build.LIBRARY: str(build.build(csrc, sanitize=False))},
        cwd=build.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout + done.stderr
