"""Test runs in forks of a process that has imported what takes most of a short run's time.

Nothing of ours is imported there: each fork finds it in a folder of its own.
"""

import multiprocessing
import os
import sys
from collections.abc import Iterable
from pathlib import Path

LIBRARIES = [
    "torch",
    "triton.language",
    "triton.runtime.interpreter",
    "hypothesis.strategies",
    "transformers",
]
LIMIT = 240  # seconds


def run_tests(folder: Path, nodes: Iterable[str], environment: dict[str, str]) -> tuple[int | None, str]:
    """pytest's exit status, None where it ran past the limit, and what it printed. The sources in `folder`
    are tested, and `environment` is what changes of this process's."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    log = folder / "log"
    process = context.Process(target=_run, args=(folder, [f"tests/{n}" for n in nodes], environment, log))
    process.start()
    process.join(LIMIT)
    status = process.exitcode
    if status is None:
        process.kill()
    return status, log.read_text()


def _run(folder: Path, tests: list[str], environment: dict[str, str], log: Path) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = [str(folder), str(folder / "python")]
    import pytest

    status = pytest.main(["-x", "-p", "no:cacheprovider", *tests])
    sys.stdout.flush()
    os._exit(status)
