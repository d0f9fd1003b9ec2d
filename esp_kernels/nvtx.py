"""NVTX ranges in one domain, `esp_kernels`: one around each op, and what callers mark with `span`.

They are on where a profiler has told the process that it listens (NVTX_INJECTION64_PATH, which Nsight Systems
sets) or ESP_NVTX=1 asks for them, and the package nvtx is installed; ESP_NVTX=0 keeps them off. Off, an op is
called as if they did not exist. Within a CUDA graph there are none: the host does not pass by.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any


def _domain_if_listening() -> Any:
    if os.environ.get("ESP_NVTX", "1" if "NVTX_INJECTION64_PATH" in os.environ else "0") != "1":
        return None
    try:
        import nvtx
    except ImportError:
        return None
    return nvtx.get_domain("esp_kernels")


_domain = _domain_if_listening()


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Marks what runs inside as the range `name` on the profiler's timeline."""
    if _domain is None:
        yield
        return
    _domain.push_range(_domain.get_event_attributes(message=name))
    try:
        yield
    finally:
        _domain.pop_range()


def ranged(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` within a range, or `run` itself where nobody listens."""
    if _domain is None:
        return run

    def marked(*args: Any) -> Any:
        with span(name):
            return run(*args)

    return marked
