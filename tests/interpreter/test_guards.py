"""Each guard stops a kernel made to break its rule, and lets the right one pass."""

import pytest
import torch
import triton
import triton.language as tl

from esp_kernels import _backend

from .guards import GuardError

pytestmark = pytest.mark.skipif(not _backend.interpreting(), reason="kernels run natively on this machine")


@triton.jit
def _copy_kernel(x, y, n, shift, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i + shift, tl.load(x + i, mask=i < n, other=0.0), mask=i < n)


def test_a_right_kernel_passes():
    x = torch.randn(70)
    y = torch.zeros(70)
    _copy_kernel[(5,)](x, y, 70, 0, BLOCK=16)
    assert torch.equal(x, y)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_store_outside(shift):
    with pytest.raises(GuardError, match="writes 1 lanes outside of all tensors"):
        _copy_kernel[(5,)](torch.randn(70), torch.zeros(70), 70, shift, BLOCK=16)


def test_a_load_outside():
    with pytest.raises(GuardError, match="reads 1 lanes outside of all tensors"):
        _copy_kernel[(5,)](torch.randn(69), torch.zeros(80), 70, 0, BLOCK=16)


def test_a_gap_between_the_rows_of_a_view_belongs_to_it():
    x, y = torch.randn(8, 10)[:, :4], torch.zeros(80)
    _copy_kernel[(5,)](x, y, 74, 0, BLOCK=16)
    with pytest.raises(GuardError, match="reads 1 lanes outside"):
        _copy_kernel[(5,)](x, y, 75, 0, BLOCK=16)


@triton.jit
def _unmasked_kernel(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) + 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_a_masked_lane_without_other_is_poisoned(dtype):
    x, y = torch.ones(8, dtype=dtype), torch.zeros(8, dtype=dtype)
    _unmasked_kernel[(1,)](x, y, 6, BLOCK=8)
    assert y[:6].eq(1).all() and (y[6:].isnan() if dtype.is_floating_point else y[6:].eq(-1)).all()


@triton.jit
def _sum_kernel(x, total, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(total, tl.load(total) + tl.sum(tl.load(x + i), 0))


def test_programs_that_write_one_address():
    _sum_kernel[(1,)](torch.ones(8), torch.zeros(1), BLOCK=8)
    with pytest.raises(GuardError, match="two programs write one address"):
        _sum_kernel[(2,)](torch.ones(16), torch.zeros(1), BLOCK=8)


@triton.jit
def _neighbour_kernel(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i + 1, mask=i + 1 < n, other=0.0), mask=i < n)


def test_a_program_that_reads_what_another_writes():
    x = torch.arange(16.0)
    _neighbour_kernel[(1,)](x, 16, BLOCK=16)
    assert x.tolist() == [*range(1, 16), 0]
    with pytest.raises(GuardError, match="a program reads what another one writes"):
        _neighbour_kernel[(2,)](torch.arange(16.0), 16, BLOCK=8)


@triton.jit
def _fold_kernel(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i // 2, tl.load(x + i))


def test_a_store_that_writes_an_address_twice():
    with pytest.raises(GuardError, match="writes an address twice in one store"):
        _fold_kernel[(1,)](torch.ones(8), torch.zeros(4), BLOCK=8)
