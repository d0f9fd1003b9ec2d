"""Repairs of Triton's interpreter, which keeps bfloat16 as raw uint16 and computes on the bit patterns.

Triton 3.6 to 3.9 truncate float32 to bfloat16 and multiply, add and compare raw bits. Repaired, each of these
is bit-equal to torch: widen to float32, compute, round to nearest even. test_repairs.py notices when Triton
needs them no longer, or when they no longer fit.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

Builder = interpreter.InterpreterBuilder
Handle = interpreter.TensorHandle
BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
sorting_network = tl.standard.sort_impl
FLOATS = {tl.bfloat16, tl.float16, tl.float32, tl.float64}


def narrow(values: np.ndarray) -> np.ndarray:
    rounded = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().view(np.uint16).reshape(values.shape)


def widen(bits: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32).reshape(bits.shape)


def is_bf16(handle: Handle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def as_float32(handle: Handle) -> Handle:
    return Handle(widen(handle.data), tl.float32) if is_bf16(handle) else handle


def sort_impl(x, k=None, dim=None, descending=False):
    """What tl.sort and tl.topk do in hundreds of interpreted steps, for integers along the last dimension."""
    k, dim, descending = (getattr(option, "value", option) for option in (k, dim, descending))
    assert x.dtype.is_int() and dim in (None, -1, len(x.shape) - 1)
    data = np.sort(x.handle.data, axis=-1)
    data = (data[..., ::-1] if descending else data)[..., :k]
    return tl.tensor(Handle(data, x.dtype), tl.block_type(x.dtype, list(data.shape)))


def install() -> None:
    patched: set[Callable] = set()
    run_grid = interpreter.GridExecutor.__call__
    binary, unary = Builder.binary_op, Builder.unary_op
    cast, convert = Builder.cast_impl, Builder.create_fp_to_fp
    reduce = interpreter.ReduceOps.apply_impl

    def cast_impl(self, src, target):
        source, wanted = src.dtype.scalar, target.scalar
        if source != wanted and source == tl.bfloat16:
            values = widen(src.data)
            return Handle(values.astype(interpreter._get_np_dtype(wanted)), wanted)
        if source != wanted and wanted == tl.bfloat16:
            return Handle(narrow(src.data), wanted)
        return cast(self, src, target)

    def create_fp_to_fp(self, src, target, rounding):
        kinds = {src.dtype.scalar, target.scalar}
        if tl.bfloat16 in kinds and kinds <= FLOATS:
            return cast_impl(self, src, target)
        return convert(self, src, target, rounding)

    def create_dot(self, a, b, d, *_):
        left, right = (as_float32(x).data.astype(d.data.dtype) for x in (a, b))
        total = d.data
        for k in range(left.shape[-1]):
            total = total + left[..., :, k, None] * right[..., k, None, :]
        return Handle(total, d.dtype.scalar)

    def binary_op(self, left, right, op):
        if not (is_bf16(left) or is_bf16(right)) or op in BITWISE:
            result = binary(self, left, right, op)
            # Triton calls the outcome of a comparison what was compared, and spreads a scalar one as that.
            return Handle(result.data, tl.int1) if result.data.dtype == np.bool_ else result
        result = op(as_float32(left).data, as_float32(right).data)
        if result.dtype == np.bool_:
            return Handle(result, tl.int1)
        return Handle(narrow(result), tl.bfloat16)

    def unary_op(self, value, op):
        if is_bf16(value):
            return Handle(narrow(op(widen(value.data))), tl.bfloat16)
        return unary(self, value, op)

    def apply_impl(self, values):
        # tl.flip is made of these; one element at a time they take seconds.
        if self.combine_fn is not tl.standard._xor_combine:
            return reduce(self, values)
        (value,) = values
        data = np.bitwise_xor.reduce(value.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(data, value.dtype)

    def launch(self, *args, **kwargs):
        patched.clear()
        return run_grid(self, *args, **kwargs)

    def call_device_function(self, *args, **kwargs):
        if self.fn not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(self.fn)
        return self.rewrite()(*args, **kwargs)

    # Overflow checks of integer sums take a third of the time, and small shapes cannot overflow.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter.GridExecutor.__call__ = launch
    interpreter.InterpretedFunction.__call__ = call_device_function
    tl.standard.sort_impl = sort_impl
    interpreter.ReduceOps.apply_impl = apply_impl
    Builder.create_dot, Builder.binary_op, Builder.unary_op = create_dot, binary_op, unary_op
    Builder.cast_impl, Builder.create_fp_to_fp = cast_impl, create_fp_to_fp
