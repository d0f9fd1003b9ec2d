"""The decode step as one CUDA graph."""

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import torch


def capture(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """`run`, which must not sync, as a graph, and what it returned: at every replay the same tensors."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # kernels are compiled and workspaces allocated outside of the capture
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


class StepGraph:
    """A step captured once and replayed at the same addresses; the host reads one step behind.

    run    a step without host syncs, which returns the tokens it commits
    state  the tensors that it changes; capturing leaves their values alone
    """

    def __init__(self, run: Callable[[], torch.Tensor], state: Sequence[torch.Tensor]):
        before = [t.clone() for t in state]
        self._graph, self._committed = capture(run)
        for t, value in zip(state, before, strict=True):
            t.copy_(value)
        self._read = [torch.cuda.Event() for _ in range(2)]
        self._host = [
            torch.empty(self._committed.shape, dtype=torch.int32, pin_memory=True) for _ in range(2)
        ]

    def replays(self) -> Iterator[torch.Tensor]:
        """Yields the committed tokens of step after step; the next one already runs when the host gets them.

        What is yielded is written over two steps later.
        """
        self._launch(0)
        for turn in count(1):
            self._launch(turn % 2)
            self._read[(turn - 1) % 2].synchronize()
            yield self._host[(turn - 1) % 2]

    def _launch(self, slot: int) -> None:
        self._graph.replay()
        self._host[slot].copy_(self._committed, non_blocking=True)
        self._read[slot].record()
