"""Time on a CUDA card: medians of graph replays with a cold L2, and the roof that the card reaches today."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from esp_decode.graph import capture

REPEATS = 10  # runs in a graph
SPENT = 0.1  # seconds of replays a measurement


def median_seconds(replay: Callable[[], None]) -> float:
    """The median by events, after one replay to warm up."""
    replay()
    first = _event_seconds(replay)
    count = max(5, min(50, round(SPENT / first)))
    return statistics.median(_event_seconds(replay) for _ in range(count))


def _event_seconds(replay: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def captured(run: Callable[[], object], repeats: int) -> torch.cuda.CUDAGraph:
    """`run` in a graph, as often as told."""

    def repeatedly() -> None:
        for _ in range(repeats):
            run()

    return capture(repeatedly)[0]


class ColdTimer:
    """Seconds of a run whose inputs are not in L2: before each one, twice the L2 is read. What that takes by
    itself is measured once and subtracted."""

    def __init__(self) -> None:
        size = 2 * torch.cuda.get_device_properties().L2_cache_size
        self._other = torch.zeros(size // 4, dtype=torch.int32, device="cuda")
        self._sink = torch.zeros((), dtype=torch.int32, device="cuda")
        self._flush_seconds = self._graph_seconds(self._flush)

    def __call__(self, run: Callable[[], object]) -> float:
        def cold() -> None:
            self._flush()
            run()

        return max(self._graph_seconds(cold) - self._flush_seconds, 1e-9)

    def _flush(self) -> None:
        torch.amax(self._other, 0, out=self._sink)

    @staticmethod
    def _graph_seconds(run: Callable[[], object]) -> float:
        return median_seconds(captured(run, REPEATS).replay) / REPEATS


@dataclass(frozen=True)
class Roof:
    """bytes/s of a large copy, read and written, and FLOP/s of a large bfloat16 product."""

    bandwidth: float
    peak: float

    @classmethod
    def measured(cls, seconds: Callable[[Callable[[], object]], float]) -> "Roof":
        source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        copy = seconds(lambda: target.copy_(source))
        n = 8192
        a, b = torch.randn(2, n, n, dtype=torch.bfloat16, device="cuda").unbind()
        out = torch.empty_like(a)
        product = seconds(lambda: torch.mm(a, b, out=out))
        return cls(2 * source.numel() / copy, 2 * n**3 / product)

    def seconds(self, moved: int, flops: int) -> float:
        """What a run cannot go below."""
        return max(moved / self.bandwidth, flops / self.peak)

    def memory_bound(self, moved: int, flops: int) -> bool:
        return moved / self.bandwidth >= flops / self.peak
