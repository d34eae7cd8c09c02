"""Unisono itself as a contender."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from unisono.bench.peer import Peer
from unisono.bench.problem import Problem, Slot
from unisono.communicator import Communicator
from unisono.wrappers.trace import trace

__all__ = ["Own"]


class Own(Peer):
    """The calls that a program would make.

    Args:
        comm: The ranks.
        folder: Where the trace goes by which `chosen` finds out.
        algorithm: As for each collective.
    """

    def __init__(self, comm: Communicator, folder: Path, algorithm: str | None = None) -> None:
        self._comm, self._folder, self._algorithm = comm, folder, algorithm

    def bind(self, problem: Problem, slot: Slot) -> Callable[[], object]:
        return _BIND[problem.collective](self._comm, problem, slot, self._algorithm)

    def chosen(self, call: Callable[[], object]) -> str:
        """Make a call, and tell the algorithm that it took. Collective."""
        with trace(self._folder / f"trace of rank {self._comm.rank}.json") as events:
            call()
        return next(str(event.detail["algorithm"]) for event in events if event.kind == "begin")


def _gather(comm: Communicator, problem: Problem, slot: Slot, algorithm: str | None) -> Callable[[], object]:
    parts = slot.target.split(problem.count) if comm.rank == 0 else None
    return partial(comm.gather, slot.source, parts, 0, algorithm=algorithm)


def _scatter(comm: Communicator, problem: Problem, slot: Slot, algorithm: str | None) -> Callable[[], object]:
    parts = slot.source.split(problem.count) if comm.rank == 0 else None
    return partial(comm.scatter, slot.target, parts, 0, algorithm=algorithm)


_BIND: dict[str, Callable[[Communicator, Problem, Slot, str | None], Callable[[], object]]] = {
    "all_reduce": lambda c, p, s, a: partial(c.all_reduce, s.target, p.op.value, algorithm=a),
    "reduce": lambda c, p, s, a: partial(c.reduce, s.target, 0, p.op.value, algorithm=a),
    "broadcast": lambda c, p, s, a: partial(c.broadcast, s.target, 0, algorithm=a),
    "all_gather": lambda c, p, s, a: partial(c.all_gather_single, s.target, s.source, algorithm=a),
    "reduce_scatter": lambda c, p, s, a: partial(c.reduce_scatter_single, s.target, s.source, p.op.value, algorithm=a),
    "all_to_all": lambda c, p, s, a: partial(c.all_to_all_single, s.target, s.source, algorithm=a),
    "gather": _gather,
    "scatter": _scatter,
    "barrier": lambda c, p, s, a: partial(c.barrier, algorithm=a),
}
