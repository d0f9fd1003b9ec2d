import random
import zlib

import pytest
import torch

from esp_kernels import _backend, _library
from tests.device import BACKENDS, DEVICE
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
    config.addinivalue_line(
        "markers", "on_host: expects values to be checked, which they are on the CPU only"
    )
    config.addinivalue_line("markers", "on_device: runs on a card too, without a parameter `backend`")


def serves(backend: str, op: str | None) -> bool:
    if backend == "triton":
        return op is not None and _backend.has_triton_kernel(op)
    if backend == "cuda":
        return op in _backend.CUDA_OPS and build.serves_cuda()
    return True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    own = any("backend" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "backend" in metafunc.fixturenames and not own:
        op = op_of(metafunc.module.__name__)
        metafunc.parametrize("backend", [one for one in BACKENDS if serves(one, op)])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if DEVICE == "cpu":
        return
    native = [item for item in items if is_native(item)]
    config.hook.pytest_deselected(items=[item for item in items if not is_native(item)])
    items[:] = native


def is_native(item: pytest.Item) -> bool:
    on_device = backend_of(item) in BACKENDS or item.get_closest_marker("on_device") is not None
    return on_device and item.get_closest_marker("on_host") is None


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
