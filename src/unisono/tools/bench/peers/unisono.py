"""Unisono itself, with the algorithm that it chooses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from unisono.comm.tracing import trace
from unisono.communicator import Communicator
from unisono.tools.bench.peers import Peer
from unisono.tools.bench.workload import Slot, Workload

__all__ = ["PEER", "UnisonoPeer"]


class UnisonoPeer(Peer):
    """The communicator methods that a program would call.

    Args:
        comm: Communicator of the ranks.
        folder: Folder for the trace from which `chosen` reads the algorithm.
        algorithm: Algorithm for each collective; if None, the collective chooses.
    """

    def __init__(self, comm: Communicator, folder: Path, algorithm: str | None = None) -> None:
        self._comm = comm
        self._folder = folder
        self._algorithm = algorithm

    def bind(self, workload: Workload, slot: Slot) -> Callable[[], object]:
        call = _BIND[workload.collective](self._comm, workload, slot)
        return call if self._algorithm is None else partial(call, algorithm=self._algorithm)

    def chosen(self, call: Callable[[], object]) -> str:
        """Run a collective, and return the name of its algorithm. All ranks must call this method."""
        with trace(self._folder / f"trace of rank {self._comm.rank}.json") as events:
            call()
        return next(str(event.detail["algorithm"]) for event in events if event.kind == "collective")


def _gather(comm: Communicator, workload: Workload, slot: Slot) -> Callable[..., object]:
    parts = slot.target.split(workload.count) if comm.rank == 0 else None
    return partial(comm.gather, slot.source, parts, 0)


def _scatter(comm: Communicator, workload: Workload, slot: Slot) -> Callable[..., object]:
    parts = slot.source.split(workload.count) if comm.rank == 0 else None
    return partial(comm.scatter, slot.target, parts, 0)


_BIND: dict[str, Callable[[Communicator, Workload, Slot], Callable[..., object]]] = {
    "all_reduce": lambda c, w, s: partial(c.all_reduce, s.target, w.op.value),
    "reduce": lambda c, w, s: partial(c.reduce, s.target, 0, w.op.value),
    "broadcast": lambda c, w, s: partial(c.broadcast, s.target, 0),
    "all_gather": lambda c, w, s: partial(c.all_gather_single, s.target, s.source),
    "reduce_scatter": lambda c, w, s: partial(c.reduce_scatter_single, s.target, s.source, w.op.value),
    "all_to_all": lambda c, w, s: partial(c.all_to_all_single, s.target, s.source),
    "gather": _gather,
    "scatter": _scatter,
    "barrier": lambda c, w, s: c.barrier,
}

PEER = UnisonoPeer
