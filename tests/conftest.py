import os
import random
import zlib

import pytest
import torch

# "cuda" runs what takes a backend natively on a card (`make gpu-check`), and nothing else.
DEVICE = os.environ.get("ESP_TEST_DEVICE", "cpu")
BACKENDS = {"cpu": ("ref", "cpp", "triton", "cuda"), "cuda": ("ref", "triton", "cuda")}[DEVICE]
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
else:
    torch.set_default_device(DEVICE)

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


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "on_host: looks at values, which nobody does on a device")


def serves(backend: str, op: str | None) -> bool:
    if backend == "triton":
        return op is not None and _backend.has_triton_kernel(op)
    if backend == "cuda":
        return op in _backend.CUDA_OPS and (DEVICE == "cuda" or build.load() is not None)
    return True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    own = any("backend" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "backend" in metafunc.fixturenames and not own:
        op = op_of(metafunc.module.__name__)
        metafunc.parametrize("backend", [one for one in BACKENDS if serves(one, op)])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if DEVICE == "cpu":
        return
    native = [i for i in items if backend_of(i) in BACKENDS and not i.get_closest_marker("on_host")]
    config.hook.pytest_deselected(items=[i for i in items if i not in native])
    items[:] = native


def backend_of(item: pytest.Item) -> str | None:
    call = getattr(item, "callspec", None)
    return call.params.get("backend") if call else None


def pytest_runtest_setup(item: pytest.Function) -> None:
    """Every test of an emulated kernel has an order of threads of its own, always the same."""
    if DEVICE == "cpu" and backend_of(item) == "cuda":
        build.load().seed(zlib.crc32(item.nodeid.encode()))


@pytest.fixture
def rng() -> random.Random:
    torch.manual_seed(0)
    return random.Random(0)
