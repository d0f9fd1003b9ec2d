import os
import random
import zlib

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from esp_kernels import _backend, _library
from tests.emulator import build
from tests.interpreter import guards, repairs

if _backend.interpreting():
    repairs.install()
    guards.install()


def op_of(module: str) -> str | None:
    """The op that a test module is named for."""
    stem = module.rpartition(".")[2].removeprefix("test_")
    return max((op for op in _library.SCHEMAS if stem.startswith(op)), key=len, default=None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    own = any("backend" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "backend" in metafunc.fixturenames and not own:
        op = op_of(metafunc.module.__name__)
        backends = ["ref", "cpp", *(["triton"] if op and _backend.has_triton_kernel(op) else [])]
        backends += ["cuda"] if op in _backend.CUDA_OPS and build.load() else []
        metafunc.parametrize("backend", backends)


def pytest_runtest_setup(item: pytest.Function) -> None:
    """Every test of an emulated kernel has an order of threads of its own, always the same."""
    if getattr(item, "callspec", None) and item.callspec.params.get("backend") == "cuda":
        build.load().seed(zlib.crc32(item.nodeid.encode()))


@pytest.fixture
def rng() -> random.Random:
    torch.manual_seed(0)
    return random.Random(0)
