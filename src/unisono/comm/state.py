"""State of a communicator: whether calls can be made, and the first cause of its failure."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from threading import get_ident

from unisono.control.sockets import invalidate_after_fork
from unisono.core.control import ControlPlane
from unisono.core.failure import Cause, error_of, text_of, to_cause
from unisono.core.flight_recorder import Activity, CallRecord
from unisono.core.group import Group
from unisono.core.transport import Options, Transport
from unisono.diagnostics.hang_report import with_hang_report
from unisono.errors import AbortedError, ClosedError, CommError, CommTimeoutError, PeerLostError

__all__ = ["ANY_THREAD", "CommunicatorState", "FailureRelay", "refuses"]

ANY_THREAD = -1
"""Value of the owning thread's id that permits calls from any thread."""

_MESSAGES = frozenset({"send", "recv", "isend", "irecv", "sendrecv", "batch_isend_irecv", "probe", "iprobe"})
_PATIENCE_S = 1.0
"""Seconds that a rank with a broken connection waits for the control plane to report the lost rank."""


class CommunicatorState:
    """One rank's state in its group: its resources, its activity, and whether the group still works.

    Attributes:
        transport, control, options: The arguments of the constructor.
        group: The ranks.
        activity: This rank's activity.
        owner: The thread that makes calls; None before the first call.
        closed: Whether this rank has closed the communicator.
    """

    def __init__(self, transport: Transport, control: ControlPlane, options: Options) -> None:
        self.transport, self.control, self.options = transport, control, options
        self.group = group = transport.group
        self._here = {"rank": group.rank, "size": group.size, "group": group.name}
        self.activity = Activity(self.group)
        self.owner: int | None = None
        self.closed = False
        self._broken: Cause | None = None
        self._calls = 0
        self._process = os.getpid()
        invalidate_after_fork(self)

    def invalidate_after_fork(self) -> None:
        """Mark as broken in a forked child: connections and shared memory belong to the parent, still in use."""
        told = f"this communicator belongs to process {self._process}, of which this process is a fork"
        self._broken = Cause(
            "CommError", None, f"{told}; create a new communicator here, or start processes with spawn or forkserver"
        )

    @property
    def open(self) -> bool:
        """Return whether calls can be made."""
        return self._broken is None and not self.closed

    @property
    def unfinished(self) -> bool:
        """Return whether an operation started before the end is still in flight."""
        return False

    def enter(self, operation: str) -> None:
        """Raise unless this thread may call, and the communicator still works."""
        self.own(operation)
        self.check(operation)

    def own(self, operation: str) -> None:
        """Raise unless this thread may call; the first one to call becomes the owner."""
        here = get_ident()
        if self.owner is None:
            self.owner = self.activity.owner = here
        if self.owner not in (here, ANY_THREAD):
            error = CommError(
                f"this communicator belongs to another thread than {threading.current_thread().name!r}; "
                "call release_thread() there first, or use dup() for a second communicator"
            )
            raise self.with_context(error, operation)

    def check(self, operation: str | None) -> None:
        """Raise if no call, such as this operation, can be made any more."""
        if self.closed:
            raise self.with_context(ClosedError("the communicator is closed; create a new communicator"), operation)
        if self._broken is not None:
            raise self.with_context(error_of(self._broken, self.group), operation)

    def on_failure(self, cause: Cause) -> None:
        """Break the group, and end every wait in it; the control plane calls this from a thread of its own."""
        if self._broken is None and (not self.closed or self.unfinished):
            self._broken = cause
            self.activity.broken = True
            self.transport.abort(error_of(cause, self.group))

    def _report_collective(self, error: BaseException, noted: CallRecord) -> BaseException:
        """Return the error to raise for a call of the transport: `report_failure`, unless the call was refused."""
        # Of all else, also interrupts, other ranks have seen a part.
        if refuses(error):
            return error
        self._calls += 1
        self.activity.note(noted)
        return self.report_failure(error, noted[0], self._calls)

    def report_failure(self, error: BaseException, operation: str | None, call: int | None = None) -> BaseException:
        """Break the group for this error, and return the error to raise: the group's first cause.

        Args:
            error: Raised by the operation, or by the program itself.
            operation: Name of the operation; None for the program.
            call: Number of the operation; the next one if None.
        """
        where = operation or "the program"
        if not self.closed:
            self.activity.log_event("error", f"{type(error).__name__} in {where}: {text_of(error)}".partition("\n")[0])
        if self._broken is None:
            self.activity.timed_out = isinstance(error, CommTimeoutError)
            error = with_hang_report(error, self.control, self.group)
        own = to_cause(error, self.group.rank, where)
        first = self._broken or self._first_cause(own, error)
        if not isinstance(error, CommError):
            return error
        return self.with_context(error if first == own else _first_error(error, first, self.group), operation, call)

    def _first_cause(self, own: Cause, error: BaseException) -> Cause:
        """Report a cause of this rank's, and return the group's first one."""
        anonymous = isinstance(error, PeerLostError) and error.peer is None
        known = self.control.first_cause(self.group, _PATIENCE_S if anonymous else 0.0)
        first = known or self.control.report_failure(self.group, own)
        self.on_failure(first)
        return first

    def with_context(self, error: CommError, operation: str | None, call: int | None = None) -> CommError:
        """Return the error with its context: rank, location, and the call's number (or the next number)."""
        if call is None and operation is not None:
            # Messages are counted by themselves.
            call = 1 + (self.activity.messages if operation in _MESSAGES else self._calls)
        return error.locate(**self._here, operation=operation, call=call)


class FailureRelay:
    """Relay of failures from the control plane to a communicator, without a reference that keeps it alive.

    A failure that arrives before the communicator is created is kept for it.
    """

    def __init__(self) -> None:
        self._causes: list[Cause] = []
        self._state: Callable[[], CommunicatorState | None] = lambda: None

    def on_failure(self, cause: Cause) -> None:
        """Pass a cause on, from any thread."""
        self._causes.append(cause)
        state = self._state()
        if state is not None:
            state.on_failure(cause)

    def connect(self, state: CommunicatorState) -> None:
        """Pass on all causes, those of the past too."""
        self._state = weakref.ref(state)
        for cause in self._causes:
            state.on_failure(cause)


def refuses(error: BaseException) -> bool:
    """Return whether an error refuses a call for its arguments, before anything is done."""
    return isinstance(error, TypeError | ValueError) and not isinstance(error, CommError)


def _first_error(error: CommError, first: Cause, group: Group) -> CommError:
    """Return the error of the group's first cause for a rank with an error that results from it."""
    if isinstance(error, CommTimeoutError) and type(error).__name__ == first.kind:
        # The first report is the right one: by the time of a later report, ranks may have continued.
        if "\n" in first.message:
            error.message = error.message.partition("\n")[0] + "\n" + first.message.partition("\n")[2]
        return error
    # Prefer the first report of a lost rank: it carries the original exception, later ones only "left".
    if isinstance(error, AbortedError) or (type(error).__name__ == first.kind and not isinstance(error, PeerLostError)):
        return error
    told = error_of(first, group)
    told.__cause__ = error
    return told
