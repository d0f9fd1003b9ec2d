"""Which backends exist, and the choice.

`auto` is the dispatcher's own choice: the native C++ ops on the CPU when they are built, the PyTorch
reference everywhere else (said once). A backend named explicitly serves or raises.
"""

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch

BACKENDS = ("auto", "ref", "cpp")


class BackendWarning(UserWarning):
    """An op runs on a slower backend than this device could have."""


try:
    importlib.import_module("esp_kernels._C")
    native_error: str | None = None
except ImportError as error:
    native_error = str(error)


def reference(op: str) -> Callable[..., Any]:
    """The checked reference of `op`: same arguments, checks and sentences as the native op."""
    check = importlib.import_module(f"esp_kernels.ops.{op}").check
    run = getattr(importlib.import_module(f"esp_kernels.ref.{op}"), op)

    def checked(*args: Any) -> Any:
        check(*args)
        return run(*args)

    return checked


@functools.cache
def _warn_once(device_type: str) -> None:
    what = (
        f"they are not built ({native_error})"
        if device_type == "cpu"
        else f"there are none for {device_type}"
    )
    warnings.warn(
        f"esp_kernels runs on the PyTorch reference, since native ops are missing: {what}",
        BackendWarning,
        stacklevel=4,
    )


def fallback(op: str, device_type: str) -> Callable[..., Any]:
    """What the dispatcher runs where no native op is registered."""

    def run(*args: Any) -> Any:
        _warn_once(device_type)
        return reference(op)(*args)

    return run


def served_by(op: str, device_type: str) -> list[str]:
    """The backends that can run `op` on a device, best first."""
    native = ["cpp"] if device_type == "cpu" and native_error is None else []
    return [*native, "ref"]


@functools.cache
def _select(op: str, backend: str, device_type: str) -> Callable[..., Any]:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "ref":
        return reference(op)
    if backend == "cpp" and device_type != "cpu":
        raise ValueError(f"backend 'cpp' serves {op} on cpu only, got a tensor on {device_type}")
    if backend == "cpp" and native_error is not None:
        raise ValueError(f"backend 'cpp' cannot serve {op}: the native ops are not built ({native_error})")
    return getattr(torch.ops.esp_kernels, op).default


def select(op: str, backend: str, tensor: torch.Tensor, name: str) -> Callable[..., Any]:
    """The callable that runs `op`; `tensor`, the argument `name`, tells the device."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    return _select(op, backend, tensor.device.type)
