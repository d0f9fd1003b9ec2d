"""The emulator runs right kernels right, in every order of threads, and notices wrong ones."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from . import build

KERNELS = [
    "rotate",
    "rotate_unsynchronised",
    "sum_lanes",
    "two_barriers",
    "early_exit",
    "missing_lane",
    "two_collectives",
    "past_the_end",
]  # as in broken.cu
SOURCE = Path(__file__).parent / "broken.cu"
THREADS = 64

pytestmark = pytest.mark.skipif(build.load() is None, reason="no C++ compiler to emulate CUDA with")
Run = Callable[[str, int], "list[int] | str"]


@pytest.fixture(scope="module")
def run() -> Run:
    library = ctypes.CDLL(str(build.build_one(SOURCE)))
    library.run.restype = ctypes.c_char_p

    def run(kernel: str, seed: int) -> "list[int] | str":
        library.esp_emulator_seed(ctypes.c_uint(seed))
        out = (ctypes.c_int * THREADS)()
        error = library.run(KERNELS.index(kernel), out, THREADS)
        return error.decode() if error else list(out)

    return run


@pytest.mark.parametrize("seed", range(6))
def test_barriers(run, seed):
    assert run("rotate", seed) == [(i + 1) % THREADS for i in range(THREADS)]


@pytest.mark.parametrize("seed", range(6))
def test_a_missing_barrier_shows_in_every_order(run, seed):
    assert run("rotate_unsynchronised", seed) != [(i + 1) % THREADS for i in range(THREADS)]


@pytest.mark.parametrize("seed", range(6))
def test_warp_collectives(run, seed):
    expected = []
    for i in range(THREADS):
        first = i // 32 * 32
        expected.append(sum(range(first, first + 32)) + 16 + first + 7 + first + 3)
    assert run("sum_lanes", seed) == expected


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kernel", "sentence"),
    [
        ("two_barriers", "threads of one block do not meet: thread 0 waits at __syncthreads in line "),
        ("early_exit", "threads of one block do not meet: thread 0 waits at __syncthreads in line "),
        ("missing_lane", "threads of one block do not meet: thread 0 waits at __syncwarp in line "),
        ("two_collectives", "lanes of one warp do not meet: "),
    ],
)
def test_threads_that_do_not_meet(run, kernel, sentence, seed):
    error = run(kernel, seed)
    assert isinstance(error, str) and error.startswith("emulator: " + sentence)


def test_a_write_past_shared_memory_is_caught_by_asan():
    library = build.build_one(SOURCE, sanitize=True)
    script = f"import ctypes; ctypes.CDLL({str(library)!r}).run({KERNELS.index('past_the_end')}, None, 64)"
    found = [
        subprocess.run(
            [build.CXX, f"-print-file-name=lib{name}.so"], capture_output=True, text=True
        ).stdout.strip()
        for name in ("asan", "stdc++")
    ]
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": "detect_leaks=0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr, done.stderr
