"""Kernels made wrong on purpose, which the op tests must notice.

Each compiles and runs op tests anew: `make test` takes one a file, `make mutants` each n-th (ESP_MUTANTS=n).
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import op_of

from . import build

ADVANCE, COMMIT = "include/esp/advance_block.cuh", "include/esp/commit_kv.cuh"
TAIL, PREFIX = "include/esp/tree_attention.cuh", "include/esp/tree_attention_prefix.cuh"
HOPPER = "include/esp/hopper.cuh"
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
    (PREFIX, "    mbarrier_wait(&shared.full[stage], round & 1);\n", ""),
    (PREFIX, "shared.full[stage], round & 1", "shared.full[stage], (round + 1) & 1"),
    (PREFIX, "    if (round > 0) mbarrier_wait(&s.empty[stage], (round - 1) & 1);\n", ""),
    (PREFIX, "(round - 1) & 1", "round & 1"),
    (PREFIX, "    if (lane_index() == 0) mbarrier_arrive(&shared.empty[stage]);\n", ""),
    (PREFIX, "    }\n  __syncthreads();\n", "    }\n"),
    (PREFIX, "    fence_async_proxy();\n", ""),
    (PREFIX, "    wgmma_fence(acc, weights);\n", ""),
    (PREFIX, "    wgmma_wait(s);\n", ""),
    (PREFIX, "    wgmma_wait(acc);\n", ""),
    (PREFIX, "k > 0", "k > 1"),
    (PREFIX, "k % 4 * 16 * kPanelRowBytes", "k % 4 * 8 * kPanelRowBytes"),
    (PREFIX, "slot < row.span.last", "slot <= row.span.last"),
    (PREFIX, "slot >= row.span.first", "slot > row.span.first"),
    (PREFIX, "fmaf(row.total, fade, sum)", "row.total + sum"),
    (PREFIX, "at % kChunk == 0", "at % kChunk == kTile"),
    (HOPPER, "chunk ^ row % 8", "chunk ^ row % 4"),
    (TAIL, "min(position - kDeepest, prefix)", "position - kDeepest"),
    (TAIL, "key <= position", "key < position"),
    (TAIL, "key < prefix ? key", "key <= prefix ? key"),
    (TAIL, "split = (chunk + i)", "split = i"),
    (TAIL, "    wait_for_copies();\n", ""),
    (TAIL, "wait_for_copies();\n    __syncthreads();", "wait_for_copies();"),
    (TAIL, "in_pages(p, b, slot);\n  }\n  __syncthreads();", "in_pages(p, b, slot);\n  }"),
    (TAIL, "block_row[i] = 0;\n  __syncthreads();", "block_row[i] = 0;"),
    (TAIL, "  head.weight[lane] = weight;\n  __syncwarp();", "  head.weight[lane] = weight;"),
]  # fmt: skip
SHORT = [next(mutant for mutant in MUTANTS if mutant[0] == file) for file in (ADVANCE, COMMIT, PREFIX)]

EVERY = int(os.environ.get("ESP_MUTANTS", "0"))

pytestmark = pytest.mark.skipif(build.load() is None, reason="no C++ compiler to emulate CUDA with")


@pytest.mark.parametrize(("file", "old", "new"), MUTANTS[::EVERY] if EVERY else SHORT)
def test_a_mutant_is_caught(file: str, old: str, new: str, tmp_path: Path):
    csrc = tmp_path / "csrc"
    shutil.copytree(build.CSRC, csrc)
    text = (csrc / file).read_text()
    assert text.count(old) == 1
    (csrc / file).write_text(text.replace(old, new))

    op = op_of(Path(file).stem) or "tree_attention"
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
            *map(str, sorted(build.ROOT.glob(f"tests/ops/test_{op}*.py"))),
        ],
        env=os.environ | {build.LIBRARY: str(build.build(csrc, sanitize=False))},
        cwd=build.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout + done.stderr
