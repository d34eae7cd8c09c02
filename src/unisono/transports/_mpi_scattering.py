"""Scatter and reduce-scatter by MPI: by the calls that are meant for them, or by other ones where these are faster."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from unisono.mpilib import name_of
from unisono.transports._mpi_comms import Comms

__all__ = ["deal", "dealt", "one_each", "reduce_each", "take"]

_BYTES = 1 << 14
_DEALT_BYTES = 1 << 12


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


def dealt(mpi: Any, nbytes: int) -> bool:
    """Whether a scatter is made of messages, all under way at once; the same answer on every rank.

    Open MPI's root serves one rank after the other, itself among them: messages take 0.5 to 0.8 times as long from
    64 KiB for each rank, and as long at 4 KiB (2 and 4 ranks were measured).

    Args:
        mpi: The module.
        nbytes: Of each rank's part.
    """
    return nbytes >= _DEALT_BYTES and name_of(mpi).startswith("Open MPI")


def deal(comms: Comms, parts: Iterable[tuple[Any, int]], copied: tuple[int, int, int] | None) -> None:
    """What the root of a scatter does.

    Args:
        comms: Of the ranks.
        parts: What the others get, and their ranks.
        copied: To and from where its own part is copied while they read, and how many bytes; None if it lies there.
    """
    send, tag = comms.own.Isend, comms.largest_tag
    under_way = [send(part, rank, tag) for part, rank in parts]
    if copied:
        # Who copies so lets other threads run.
        ctypes.memmove(*copied)
    comms.mpi.Request.Waitall(under_way)


def take(comms: Comms, into: Any, root: int) -> None:
    """What the other ranks do."""
    comms.own.Recv(into, root, comms.largest_tag)
