"""Which backends exist, and the choice.

    ref     the PyTorch specification, on any device
    cpp     C++ on the CPU
    triton  Triton on CUDA; on the CPU only interpreted (TRITON_INTERPRET=1), which is slow and for tests
    cuda    CUDA C++; on the CPU only where tests have loaded an emulated build

`auto` takes the best that a device has and that serves the arguments, and says so once when that is the
reference. A backend named explicitly serves or raises.
"""

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from esp_kernels.nvtx import ranged

BACKENDS = ("auto", "ref", "cpp", "triton", "cuda")
CUDA_OPS = ("advance_block", "commit_kv", "tree_attention")


# Ops whose CUDA kernel `auto` takes only after Triton's: no card has told yet which of the two is faster.
TRITON_FIRST = ("tree_attention",)


class BackendWarning(UserWarning):
    """An op runs on a slower backend than this device could have."""


def _missing(module: str) -> str | None:
    """Why a module cannot be imported, or None when it is."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return str(error)
    return None


native_error = _missing("esp_kernels._C")
cuda_error = _missing("esp_kernels._cuda")
triton_error = None if importlib.util.find_spec("triton") else "No module named 'triton'"


def interpreting() -> bool:
    """Whether Triton kernels are interpreted, on CPU tensors."""
    if triton_error is not None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


@functools.cache
def unchecked(op: str, kind: str) -> Callable[..., Any]:
    """`op` of a backend that leaves its checks to Python."""
    if kind == "cuda":
        run = getattr(torch.ops.esp_kernels_cuda, op).default
    else:
        run = getattr(importlib.import_module(f"esp_kernels.{kind}.{op}"), op)

    def on_device(*args: Any) -> Any:
        with torch.cuda.device_of(next(a for a in args if isinstance(a, torch.Tensor))):
            return run(*args)

    return on_device


@functools.cache
def _ops_module(op: str) -> ModuleType:
    return importlib.import_module(f"esp_kernels.ops.{op}")


def refusal(op: str, kind: str, args: Sequence[Any]) -> str | None:
    """Why a kernel does not take arguments that passed `check`, or None when it does. Only CUDA kernels are
    for less than the op's contract: ops/<op>.py says so in `cuda_refusal`."""
    if kind != "cuda" or not hasattr(_ops_module(op), "cuda_refusal"):
        return None
    why = _ops_module(op).cuda_refusal(*args)
    return None if why is None else f"backend 'cuda' cannot serve {op}: {why}"


@functools.cache
def in_python(op: str, kind: str) -> Callable[..., Any]:
    """`op` of such a backend behind the same checks and sentences as native ops."""
    check, run = _ops_module(op).check, unchecked(op, kind)

    def checked(*args: Any) -> Any:
        check(*args)
        why = refusal(op, kind, args)
        if why is not None:
            raise ValueError(why)
        return run(*args)

    return checked


@functools.cache
def has_triton_kernel(op: str) -> bool:
    return importlib.util.find_spec(f"esp_kernels.triton.{op}") is not None


def has_cuda_kernel(op: str, device_type: str) -> bool:
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device_type)
    if op not in CUDA_OPS or key is None:
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"esp_kernels_cuda::{op}", key)


@functools.cache
def _warn_once(why: str) -> None:
    warnings.warn(f"esp_kernels runs on the PyTorch reference, since {why}", BackendWarning, stacklevel=4)


def _missing_ops(device_type: str) -> str:
    error = {"cpu": native_error, "cuda": triton_error}.get(device_type)
    why = f"there are none for {device_type}" if error is None else f"they cannot be loaded ({error})"
    return f"faster ops are missing: {why}"


def fallback(op: str, device_type: str) -> Callable[..., Any]:
    """What the dispatcher runs where no native op is registered."""

    def run(*args: Any) -> Any:
        _ops_module(op).check(*args)
        refusals = []
        for kind in served_by(op, device_type):
            why = refusal(op, kind, args)
            if why is None:
                break
            refusals.append(why)
        if kind == "ref":
            _warn_once(refusals[0] if refusals else _missing_ops(device_type))
        return unchecked(op, kind)(*args)

    return run


def why_not(op: str, backend: str, device_type: str) -> str | None:
    """Why a backend cannot run `op` on a device, or None when it can."""
    if backend == "cpp":
        if device_type != "cpu":
            return f"it runs on cpu, got a tensor on {device_type}"
        return None if native_error is None else f"the native ops are not built ({native_error})"
    if backend == "triton":
        if triton_error is not None:
            return f"triton cannot be loaded ({triton_error})"
        if not has_triton_kernel(op):
            return "it has no kernel for it"
        if device_type != "cuda" and not (device_type == "cpu" and interpreting()):
            return (
                f"it runs on cuda, or interpreted on cpu (TRITON_INTERPRET=1), got a tensor on {device_type}"
            )
        return None
    if backend == "cuda" and not has_cuda_kernel(op, device_type):
        if op not in CUDA_OPS:
            return "it has no kernel for it"
        if device_type != "cuda":
            return f"it runs on cuda, got a tensor on {device_type}"
        return f"the CUDA ops are not built ({cuda_error})"
    return None


def served_by(op: str, device_type: str) -> list[str]:
    """The backends that can run `op` on a device, best first; interpreted ones are not among them."""
    if device_type == "cpu":
        fast = ["cpp"]
    elif op in TRITON_FIRST:
        fast = ["triton", "cuda"]
    else:
        fast = ["cuda", "triton"]
    return [*(one for one in fast if why_not(op, one, device_type) is None), "ref"]


@functools.cache
def _select(op: str, backend: str, device_type: str) -> Callable[..., Any]:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    reason = why_not(op, backend, device_type)
    if reason is not None:
        raise ValueError(f"backend {backend!r} cannot serve {op}: {reason}")
    if backend in ("ref", "triton", "cuda"):
        return ranged(op, in_python(op, backend))
    return ranged(op, getattr(torch.ops.esp_kernels, op).default)


def select(op: str, backend: str, tensor: torch.Tensor, name: str) -> Callable[..., Any]:
    """The callable that runs `op`; `tensor`, the argument `name`, tells the device."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    return _select(op, backend, tensor.device.type)
