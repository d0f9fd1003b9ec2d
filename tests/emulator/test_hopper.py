"""The emulator's models of Hopper: barriers in shared memory, copies and matrix products."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from . import build

FLAWS = [
    "none",
    "not_initialised",
    "not_waited_for",
    "wrong_parity",
    "no_proxy_fence",
    "no_register_fence",
    "not_committed",
    "read_too_early",
    "overwritten",
    "other_swizzle",
    "one_thread_stays_away",
    "never_arrives",
]  # as in broken_hopper.cu
SOURCE = Path(__file__).parent / "broken_hopper.cu"
Run = Callable[[str, bool, int], "torch.Tensor | str"]

pytestmark = pytest.mark.skipif(build.load() is None, reason="no C++ compiler to emulate CUDA with")


@pytest.fixture(scope="module")
def operands() -> torch.Tensor:
    return torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.fixture(scope="module")
def run(operands: torch.Tensor) -> Run:
    library = ctypes.CDLL(str(build.build_one(SOURCE)))
    library.run.restype = ctypes.c_char_p

    def run(flaw: str, registers: bool, seed: int) -> "torch.Tensor | str":
        library.esp_emulator_seed(ctypes.c_uint(seed))
        out = torch.zeros(64, 64)
        a, b, c = (ctypes.c_void_p(t.data_ptr()) for t in (*operands, out))
        error = library.run(FLAWS.index(flaw), registers, a, b, c)
        return error.decode() if error else out

    return run


def expected(operands: torch.Tensor, registers: bool) -> torch.Tensor:
    a, b = operands.float()
    return a @ b if registers else a @ b.T


@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_products(run, operands, registers, seed):
    torch.testing.assert_close(run("none", registers, seed), expected(operands, registers))


@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize(
    ("flaw", "sentence"),
    [
        ("not_initialised", "a barrier in shared memory is used before it is initialised"),
        ("no_proxy_fence", "no fence_async_proxy before wgmma in line "),
        ("no_register_fence", "no wgmma_fence before wgmma in line "),
        ("not_committed", "wgmma_wait for what was not committed in line "),
        ("overwritten", "shared memory changed before the end of wgmma in line "),
        ("one_thread_stays_away", "not all of a warpgroup issued wgmma in line "),
        ("never_arrives", "threads of one block do not meet: thread 0 waits at mbarrier_wait in line "),
    ],
)
def test_broken_rules_are_errors(run, flaw, sentence, registers):
    for seed in range(4):
        assert run(flaw, registers, seed).startswith("emulator: " + sentence)


@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize("flaw", ["not_waited_for", "wrong_parity"])
def test_what_is_not_waited_for_has_not_landed(run, operands, flaw, registers):
    for seed in (0, 2, 3):  # seed 1 lets copies land at once
        found = run(flaw, registers, seed)
        assert isinstance(found, str) or not torch.allclose(
            found, expected(operands, registers), equal_nan=True
        )


@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_product_is_not_there_before_the_wait(run, registers, seed):
    assert run("read_too_early", registers, seed).isnan().all()


@pytest.mark.parametrize("registers", [False, True])
def test_the_swizzle_matters(run, operands, registers):
    assert not torch.allclose(run("other_swizzle", registers, 0), expected(operands, registers))
