"""A barrier that can be aborted and then repeated."""

from __future__ import annotations

from unisono.communicator import Communicator, engine_of
from unisono.core.failure import Cause
from unisono.core.flight_recorder import Activity
from unisono.core.group import Group
from unisono.errors import CommError

__all__ = ["RepeatableBarrier"]


class RepeatableBarrier:
    """A barrier of a communicator's ranks, which can be used again after an abort or a timeout.

    An aborted communicator is broken forever. Each call of `wait` therefore uses its own group in the control plane,
    and an abort breaks only that group. Calls are matched by their number. If a call has already failed on the other
    ranks when a rank reaches it, this rank skips that call, and waits for the other ranks in the next call.

    Args:
        comm: Communicator of the ranks. If the communicator fails, waits in the barrier fail too. Construction is not
            collective.

    Attributes:
        name: Group name under which hang reports show a rank that waits here.

    Example:
        >>> from unisono.utils.repeatable_barrier import RepeatableBarrier
        >>> def program(comm):
        ...     barrier = RepeatableBarrier(comm)
        ...     if comm.rank == 0:
        ...         barrier.abort("not now")
        ...     try:
        ...         barrier.wait()
        ...     except un.errors.AbortedError:
        ...         barrier.wait()
        ...     return "all ranks are here"
        >>> un.launch(program, 2, "thread")
        ['all ranks are here', 'all ranks are here']
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._number = 1
        engine = engine_of(comm)
        # Use one activity for all calls of `wait`, because hang reports recognise a missing rank by its lower number of
        # calls.
        self._activity = Activity(engine.group.child("barriers", range(comm.size)))
        self.name: str = self._activity.group.name
        engine.control.watch(self._activity)

    def _group(self, number: int) -> Group:
        return engine_of(self._comm).group.child(f"barrier {number}", range(self._comm.size))

    def wait(self) -> None:
        """Wait until all ranks call `wait`. If the call or the communicator fails, raises the error of the failure."""
        control = engine_of(self._comm).control
        given_up = True
        while given_up:
            group = self._group(self._number)
            with self._activity.exchanging("split"):
                # Before joining, find out whether the other ranks have already given up this call; if so, skip it. If
                # the call fails later, this rank raises the error like the other ranks. Whether this rank skips the
                # call or raises, all ranks meet in the next call.
                given_up = control.first_cause(group) is not None
                control.join(group)
                try:
                    # Check the communicator after joining. A rank that breaks the communicator also aborts the barrier,
                    # but if no rank had joined the barrier's group by then, only the communicator shows the failure.
                    if (error := self._comm.exception()) is not None:
                        raise error
                    if not given_up:
                        control.exchange(group, "barrier", None, engine_of(self._comm).options.timeout_s)
                except CommError as error:
                    error.locate(rank=group.rank, size=group.size, group=group.text, operation="split")
                    raise
                finally:
                    self._number += 1
                    control.leave(group)

    def abort(self, reason: str) -> None:
        """Abort the current call: every rank that waits in it raises `AbortedError`. Callable from any thread."""
        engine = engine_of(self._comm)
        if engine.life.closed:
            return
        number = self._number
        while engine.control.first_cause(self._group(number)) is not None:
            number += 1
        cause = Cause("AbortedError", self._comm.rank, f"rank {self._comm.rank} aborted the communicator: {reason}")
        engine.control.report_failure(self._group(number), cause)

    def close(self) -> None:
        """Remove the barrier from hang reports; for use once the communicator is closed. Idempotent."""
        self._activity.life.change("close")
