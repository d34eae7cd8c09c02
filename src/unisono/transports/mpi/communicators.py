"""A group's MPI communicators, one for users' messages and one for collectives, and translation of MPI's errors."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import xxhash

from unisono.core import clock
from unisono.errors import CommError, CommTimeoutError, PeerLostError
from unisono.host.mpi_library import library

__all__ = ["CommHandle", "MpiCommunicators"]

_NOTICED_S = 1.0

# Lock for MPI calls of all communicators in this process, if MPI allows only one thread at a time.
_turns = threading.RLock()
_unused: list[Any] = []
"""MPI communicators that the next constructor frees: a finalizer may run in any thread, and so must not call MPI."""


class CommHandle:
    """Private communicator that is only used to create other communicators.

    No receive may be in progress on this communicator: Open MPI's internal messages for creating a communicator match
    any-tag receives on the parent communicator.

    Args:
        comm: The MPI communicator, which is freed only after all communicators that were created from it.
    """

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def __del__(self) -> None:
        _unused.append(self.comm)

    @classmethod
    def dup(cls, comm: Any, deadline: float) -> CommHandle:
        """Duplicate a communicator. Collective; raises CommTimeoutError unless all ranks of `comm` join in time."""
        made, request = comm.Idup()
        if not clock.poll_until(request.Test, deadline, spins=1):
            raise CommTimeoutError(
                f"not all of the {comm.Get_size()} ranks of the MPI communicator joined in time. Are all of them "
                "running, and does each of them make the call?"
            )
        return cls(made)

    @classmethod
    def create(cls, comm: Any, ranks: Sequence[int], tag: int) -> CommHandle:
        """Create a communicator for a subset of another communicator's ranks. Collective over the subset."""
        return cls(*_created(comm, ranks, tag))

    def failed(self) -> set[int]:
        """Return the ranks that MPI knows to be dead; none if this MPI library does not survive rank failures."""
        mpi = library()
        with contextlib.suppress(mpi.Exception):
            # MPI detects dead ranks only while it polls for messages.
            self.comm.Iprobe()
        return _dead(self.comm)

    def shrink(self) -> CommHandle:
        """Create a communicator of the surviving ranks, in order. Collective over the surviving ranks."""
        return CommHandle(self.comm.Shrink())


class MpiCommunicators:
    """A group's two private MPI communicators. The constructor is collective over the group's ranks.

    Args:
        base: A communicator that includes these ranks.
        ranks: The group's ranks, as numbered in `base`; their order gives the new numbers.
        name: Name of the group, which distinguishes groups that are created at the same time.

    Attributes:
        mpi: The module `mpi4py.MPI`.
        users: Communicator for users' messages.
        own: Communicator for collectives and for the messages of algorithms.
        turn: Lock to hold during MPI calls.
        broken: Cause of the first failure, after which no more MPI calls are made; None before.
        deadline: Deadline of the MPI collective in progress, on the library's clock, for `Watchdog`; None between
            collectives.
        largest_tag: Largest tag that users may pass. Each user tag takes two of MPI's tags.
    """

    def __init__(self, base: CommHandle, ranks: Sequence[int], name: str) -> None:
        mpi = library()
        self.mpi: Any = mpi
        several = mpi.Query_thread() == mpi.THREAD_MULTIPLE
        self.users: Any
        self.own: Any
        self.turn: AbstractContextManager[object] = nullcontext() if several else _turns
        self.broken: BaseException | None = None
        self.deadline: float | None = None
        with self.turn:
            _free_unused()
            # The MPI standard guarantees tags up to 32767.
            tag = 2 * (xxhash.xxh3_64_intdigest(name.encode()) % 16000)
            self.users, self.own = _created(base.comm, ranks, tag, tag + 1)
            for comm in (self.users, self.own):
                comm.Set_errhandler(mpi.ERRORS_RETURN)
        self.largest_tag: int = (mpi.COMM_WORLD.Get_attr(mpi.TAG_UB) - 1) // 2
        self._base = base
        self._ranks = list(ranks)
        self._ours = [self.users, self.own]
        self._ended_by: BaseException | None = None

    def part(self, ranks: Sequence[int], name: str) -> MpiCommunicators:
        """Return communicators for a subset of this group, even if the group is broken. Collective over the subset."""
        return MpiCommunicators(self._base, [self._ranks[rank] for rank in ranks], name)

    def renewed(self, ranks: Sequence[int], name: str, union: Callable[[list[int]], set[int]]) -> MpiCommunicators:
        """Return communicators of the surviving ranks, even if other ranks of the base communicator have died.

        Args:
            ranks: The surviving ranks.
            name: Name of the surviving ranks' group.
            union: Function that takes the dead ranks known to this rank, and returns the dead ranks known to any
                survivor.
        """
        going_on = {self._ranks[rank] for rank in ranks}
        missing = set(range(self._base.comm.Get_size())) - going_on
        clock.poll_until(lambda: self._base.failed() >= missing, clock.now() + _NOTICED_S, spins=1)
        if not missing or union(sorted(self._base.failed())) < missing:
            # Don't shrink, because a missing rank may be alive: shrinking would include the missing rank, and wait for
            # it in vain, because it does not take part.
            return self.part(ranks, name)
        order = sorted(going_on)
        return MpiCommunicators(self._base.shrink(), [order.index(self._ranks[rank]) for rank in ranks], name)

    def free(self) -> None:
        """Schedule the communicators to be freed. No call may be using them. May be called from any thread."""
        # Leave freeing to the next constructor, because a finalizer may call this in a thread that is inside MPI.
        ours = self._ours
        self._ours = []
        _unused.extend(ours)

    def revoke(self, cause: BaseException) -> None:
        """On all ranks, end every wait on these communicators. Has no effect unless MPI survives rank failures."""
        self._ended_by = cause
        for comm in (self.users, self.own):
            with contextlib.suppress(NotImplementedError, self.mpi.Exception):
                comm.Revoke()

    def error_of(self, error: Any, peer: int | None = None) -> CommError:
        """Translate an exception from mpi4py.

        Args:
            error: The exception.
            peer: The peer, if the failed MPI call sent or received a message.
        """
        mpi = self.mpi
        kind = error.Get_error_class()
        if kind == mpi.ERR_REVOKED and isinstance(self._ended_by, CommError):
            return self._ended_by
        text = f"MPI reported: {error.Get_error_string().strip()}"
        if kind not in (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED):
            return CommError(text, peer=peer)
        # After a revocation, MPI does not always know which rank failed; the control plane reports that rank.
        with self.turn:
            lost = min(_dead(self.own), default=None)
        return PeerLostError(f"rank {lost} was lost: {text}" if lost is not None else text, peer=lost)


def _created(comm: Any, ranks: Sequence[int], *tags: int) -> list[Any]:
    """Create one communicator per tag for a subset of another communicator's ranks. Collective over the subset."""
    mpi_group = comm.Get_group()
    members = mpi_group.Incl(list(ranks))
    made = [comm.Create_group(members, tag) for tag in tags]
    members.Free()
    mpi_group.Free()
    return made


def _dead(comm: Any) -> set[int]:
    """Return the ranks that MPI knows to be dead; none if this MPI library does not survive rank failures."""
    try:
        failed = comm.Get_failed()
        return set(failed.Translate_ranks(list(range(failed.Get_size())), comm.Get_group()))
    except (NotImplementedError, library().Exception):
        return set()


def _free_unused() -> None:
    mpi = library()
    while _unused:
        comm = _unused.pop()
        with contextlib.suppress(mpi.Exception):
            comm.Free()
