"""The repaired interpreter against torch, bit for bit, and whether Triton's own still needs each repair."""

import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from esp_kernels import _backend

pytestmark = pytest.mark.skipif(not _backend.interpreting(), reason="kernels run natively on this machine")


@triton.jit
def _arithmetic_kernel(x, y, sums, products, larger, less, narrowed, wide, N: tl.constexpr):
    n = tl.arange(0, N)
    a, b = tl.load(x + n), tl.load(y + n)
    tl.store(sums + n, a + b)
    tl.store(products + n, a * b)
    tl.store(larger + n, tl.maximum(a, b))
    tl.store(less + n, (a < b).to(tl.int32))
    tl.store(narrowed + n, tl.load(wide + n).to(tl.bfloat16))


@triton.jit
def _dot_kernel(x, y, out, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    product = tl.dot(tl.load(x + m[:, None] * K + k[None, :]), tl.load(y + k[:, None] * N + n[None, :]))
    tl.store(out + m[:, None] * N + n[None, :], product)


@triton.jit
def _spread_kernel(x, y, n, N: tl.constexpr):
    i = tl.arange(0, N)
    first = tl.load(x) > 0
    tl.store(y + i, tl.load(x + i, mask=first & (i < n), other=7.0))


def arithmetic() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Of each operation, what the interpreter makes of it and what torch does."""
    torch.manual_seed(0)
    wide = torch.randn(64) * torch.logspace(-30, 30, 64)
    x, y = wide.bfloat16(), wide.flip(0).bfloat16()
    found = [torch.empty_like(x) for _ in range(3)] + [
        torch.empty(64, dtype=torch.int32),
        torch.empty_like(x),
    ]
    _arithmetic_kernel[(1,)](x, y, *found, wide, N=64)
    names = ("+", "*", "max", "<", "cast")
    expected = (x + y, x * y, torch.maximum(x, y), (x < y).int(), wide.bfloat16())
    return {name: pair for name, *pair in zip(names, found, expected, strict=True)}


def dot() -> tuple[torch.Tensor, torch.Tensor]:
    """Of small integers, which are exact in any order."""
    x, y = (torch.randint(-9, 9, shape).bfloat16() for shape in ((16, 32), (32, 16)))
    out = torch.empty(16, 16)
    _dot_kernel[(1,)](x, y, out, M=16, K=32, N=16)
    return out, x.float() @ y.float()


def spread() -> tuple[torch.Tensor, torch.Tensor]:
    """A scalar condition as part of a mask."""
    x, y = torch.ones(8), torch.zeros(8)
    _spread_kernel[(1,)](x, y, 5, N=8)
    return y, torch.tensor([1.0] * 5 + [7.0] * 3)


@pytest.mark.parametrize("name", ["+", "*", "max", "<", "cast"])
def test_bfloat16_is_torchs(name):
    found, expected = arithmetic()[name]
    assert torch.equal(found, expected)


def test_dot_of_bfloat16():
    assert torch.equal(*dot())


def test_a_scalar_condition_spreads_as_a_mask():
    assert torch.equal(*spread())


CANARY = """
import torch
from tests.interpreter import test_repairs as t
results = {name: lambda name=name: t.arithmetic()[name] for name in ("+", "*", "max", "<", "cast")}
results |= {"dot": t.dot, "spread": t.spread}
for name, run in results.items():
    try:
        right = torch.equal(*run())
    except Exception:
        right = False
    print(name, "right" if right else "wrong")
"""


def test_the_repairs_are_still_needed():
    """Fails when Triton has mended its interpreter: then the repair of what is right now can go."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CANARY], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    broken = ("+", "*", "max", "<", "cast", "dot", "spread")
    assert done.stdout.split("\n")[:-1] == [f"{name} wrong" for name in broken]
