"""Checks of every interpreted launch: what a GPU would do in silence, or only sometimes, is an error here.

* A lane that loads or stores must hit one of the launch's tensors. Kernels that find their tensors through a
  table of addresses are not held to that.
* A lane that is masked off without `other` yields NaN or -1, not 0.
* Two programs of a launch may not write one address, nor may one read what another writes; nor may one store
  write an address twice.
"""

import numpy as np
import torch
from triton.runtime import interpreter

Builder = interpreter.InterpreterBuilder
Grid = interpreter.GridExecutor
THROUGH_TABLES = {"_commit_kv_kernel"}


class GuardError(AssertionError):
    pass


class Launch:
    """What the programs of one launch touched: addresses, and which program it was."""

    def __init__(self, tensors: list[torch.Tensor], bounded: bool):
        spans = sorted((t.data_ptr(), t.data_ptr() + _extent(t)) for t in tensors if t.numel())
        self.bounded = bounded
        self.starts = np.array([first for first, _ in spans], dtype=np.uint64)
        # Views of one tensor overlap: the end is that of the farthest so far.
        self.ends = np.maximum.accumulate(np.array([last for _, last in spans], dtype=np.uint64))
        self.reads: list[tuple[np.ndarray, int]] = []
        self.writes: list[tuple[np.ndarray, int]] = []

    def hold(self, addresses: np.ndarray, size: int, verb: str, program: tuple[int, ...]) -> None:
        if not self.bounded or not addresses.size:
            return
        span = np.searchsorted(self.starts, addresses, side="right") - 1
        outside = (span < 0) | (addresses + np.uint64(size) > self.ends[np.maximum(span, 0)])
        if outside.any():
            raise GuardError(f"program {program} {verb} {int(outside.sum())} lanes outside of all tensors")

    def finish(self) -> None:
        """Look for races, once all programs have run."""
        written, writers = _flat(self.writes)
        if not written.size:
            return
        if ((written[1:] == written[:-1]) & (writers[1:] != writers[:-1])).any():
            raise GuardError("two programs write one address")
        read, readers = _flat(self.reads)
        at = np.minimum(np.searchsorted(written, read), written.size - 1)
        if ((written[at] == read) & (writers[at] != readers)).any():
            raise GuardError("a program reads what another one writes")


def _flat(touched: list[tuple[np.ndarray, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Addresses in order, with the programs that touched them, each pair once."""
    if not touched:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    addresses = np.concatenate([a for a, _ in touched])
    programs = np.concatenate([np.full(a.size, p, dtype=np.int64) for a, p in touched])
    order = np.lexsort((programs, addresses))
    return addresses[order], programs[order]


def _extent(t: torch.Tensor) -> int:
    return (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.element_size()


def _active(pointers: interpreter.TensorHandle, mask: interpreter.TensorHandle) -> np.ndarray:
    addresses, on = np.broadcast_arrays(pointers.data, mask.data)
    return addresses[on.astype(bool)].ravel()


def install() -> None:
    load, store, prepare, run = (
        Builder.create_masked_load,
        Builder.create_masked_store,
        Grid._init_args_hst,
        Grid.__call__,
    )
    launches: list[Launch] = []

    def program(builder: Builder) -> int:
        x, y, z = builder.grid_idx
        return (x * builder.grid_dim[1] + y) * builder.grid_dim[2] + z

    def create_masked_load(self, pointers, mask, other, *rest):
        launch, kind = launches[-1], pointers.get_element_ty()
        size = max(1, kind.primitive_bitwidth // 8)
        addresses = _active(pointers, mask)
        launch.hold(addresses, size, "reads", self.grid_idx)
        launch.reads.append((np.unique(addresses), program(self)))
        if other is None and not mask.data.all():
            poison = np.full((*pointers.data.shape, size), 0xFF, dtype=np.uint8)
            data = poison.view(interpreter._get_np_dtype(kind))[..., 0]
            other = interpreter.TensorHandle(data, kind)
        return load(self, pointers, mask, other, *rest)

    def create_masked_store(self, pointers, value, mask, *rest):
        launch = launches[-1]
        addresses = _active(pointers, mask)
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        launch.hold(addresses, size, "writes", self.grid_idx)
        once = np.unique(addresses)
        if once.size != addresses.size:
            raise GuardError(f"program {self.grid_idx} writes an address twice in one store")
        launch.writes.append((once, program(self)))
        return store(self, pointers, value, mask, *rest)

    def init_args(self, args, kwargs):
        args, kwargs = prepare(self, args, kwargs)
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        launches.append(Launch(tensors, self.fn.__name__ not in THROUGH_TABLES))
        return args, kwargs

    def call(self, *args, **kwargs):
        depth = len(launches)
        try:
            run(self, *args, **kwargs)
            launches[-1].finish()
        except interpreter.InterpreterError as error:
            cause = error.__cause__
            raise cause if isinstance(cause, GuardError) else error from None
        finally:
            del launches[depth:]

    Builder.create_masked_load, Builder.create_masked_store = create_masked_load, create_masked_store
    Grid._init_args_hst, Grid.__call__ = init_args, call
