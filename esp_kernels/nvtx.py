"""NVTX ranges in one domain, `esp_kernels`; free when no profiler listens or the nvtx package is missing."""

import contextlib
from collections.abc import Iterator

try:
    import nvtx

    _domain = nvtx.get_domain("esp_kernels")
except ImportError:
    _domain = None


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
