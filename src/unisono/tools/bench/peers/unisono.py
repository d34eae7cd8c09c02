"""Unisono itself, with the algorithm that it chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

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

        def parts(tensor: torch.Tensor) -> Sequence[torch.Tensor] | None:
            return tensor.split(workload.count) if comm.rank == 0 else None

        # Functions, so that only this workload's call is made.
        calls: dict[str, Callable[[], Callable[..., object]]] = {
            "all_reduce": lambda: partial(comm.all_reduce, slot.target, op),
            "reduce": lambda: partial(comm.reduce, slot.target, 0, op),
            "broadcast": lambda: partial(comm.broadcast, slot.target, 0),
            "all_gather": lambda: partial(comm.all_gather_single, slot.target, slot.source),
            "reduce_scatter": lambda: partial(comm.reduce_scatter_single, slot.target, slot.source, op),
            "all_to_all": lambda: partial(comm.all_to_all_single, slot.target, slot.source),
            "gather": lambda: partial(comm.gather, slot.source, parts(slot.target), 0),
            "scatter": lambda: partial(comm.scatter, slot.target, parts(slot.source), 0),
            "barrier": lambda: comm.barrier,
        }
        call = calls[workload.collective]()
        return call if self._algorithm is None else partial(call, algorithm=self._algorithm)

    def chosen(self, call: Callable[[], object]) -> str:
        """Run a collective, and return the name of its algorithm. All ranks must call this method."""
        with trace(self._folder / f"trace of rank {self._comm.rank}.json") as events:
            call()
        return next(str(event.detail["algorithm"]) for event in events if event.kind == "collective")


PEER = UnisonoPeer
