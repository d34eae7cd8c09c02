"""Reduce-scatter by MPI: by the call that is meant for it, or by one reduction for each rank where that is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from unisono.mpilib import name_of

__all__ = ["one_each", "reduce_each"]

_BYTES = 1 << 14


def one_each(mpi: Any, counts: Sequence[int], itemsize: int) -> bool:
    """Whether each rank's part is reduced by a call of its own; the same answer on every rank.

    Open MPI's call for it reduces everything to one rank, and scatters it from there: 3 to 9 times as slow from 1 MiB,
    and as fast at 16 KiB times the square of the ranks (2 to 8 of them were measured). Of MPICH, it is the other way
    around: there reductions are slow.

    Args:
        mpi: The module.
        counts: Elements of each rank's part.
        itemsize: Bytes of one.
    """
    return sum(counts) * itemsize >= _BYTES * len(counts) ** 2 and name_of(mpi).startswith("Open MPI")


def reduce_each(reduce: Callable[..., object], parts: Iterable[tuple[Any, Any]], op: Any) -> None:
    """One call for each rank: what is given for it, and where the result is written if it is this one."""
    for root, (given, into) in enumerate(parts):
        reduce(given, into, op, root)
