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
        comm = self._comm
        op = workload.op.value
        at_root = comm.rank == 0
        calls: dict[str, Callable[..., object]] = {
            "all_reduce": partial(comm.all_reduce, slot.target, op),
            "reduce": partial(comm.reduce, slot.target, 0, op),
            "broadcast": partial(comm.broadcast, slot.target, 0),
            "all_gather": partial(comm.all_gather_single, slot.target, slot.source),
            "reduce_scatter": partial(comm.reduce_scatter_single, slot.target, slot.source, op),
            "all_to_all": partial(comm.all_to_all_single, slot.target, slot.source),
            "gather": partial(comm.gather, slot.source, slot.target.split(workload.count) if at_root else None, 0),
            "scatter": partial(comm.scatter, slot.target, slot.source.split(workload.count) if at_root else None, 0),
            "barrier": comm.barrier,
        }
        call = calls[workload.collective]
        return call if self._algorithm is None else partial(call, algorithm=self._algorithm)

    def chosen(self, call: Callable[[], object]) -> str:
        """Run a collective, and return the name of its algorithm. All ranks must call this method."""
        with trace(self._folder / f"trace of rank {self._comm.rank}.json") as events:
            call()
        return next(str(event.detail["algorithm"]) for event in events if event.kind == "collective")


PEER = UnisonoPeer
