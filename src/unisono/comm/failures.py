"""Failures of one communicator: its group's first failure, which later calls raise, and this rank's own errors."""

from __future__ import annotations

import os
from contextlib import suppress

from unisono.core.call import Fingerprint
from unisono.core.control import ControlPlane
from unisono.core.failure import Cause, detached, error_of, text_of, to_cause
from unisono.core.flight_recorder import Activity
from unisono.core.forks import invalidate_after_fork
from unisono.core.group import Group
from unisono.core.hold import HOLD, can_hold, hold_ranks
from unisono.core.transport import Transport
from unisono.diagnostics.hang_report import with_hang_report
from unisono.errors import AbortedError, ClosedError, CommError, CommTimeoutError, PeerLostError

__all__ = ["Failures"]

_ON_TIMEOUT = "UNISONO_ON_TIMEOUT"
"""Environment variable: "debug" holds all ranks for a debugger when a call has timed out, before it fails."""

_MESSAGES = frozenset({"send", "recv", "isend", "irecv", "sendrecv", "batch_isend_irecv", "probe", "iprobe"})
_PATIENCE_S = 1.0
"""Seconds that a rank with a broken connection waits for the control plane to report the lost rank."""


class Failures:
    """Breaks the communicator at its group's first failure, and determines which errors this rank raises.

    A failed call reports its error to the control plane, which returns the group's first failure. This rank then aborts
    all its waits, and every later call raises an error for that failure. The control plane calls `fail` for failures
    that other ranks report.

    Args:
        transport, control: The communicator's transport and control handle.
        activity: This rank's activity, whose `life` is the communicator's phase.
        backend: The communicator's backend.

    Attributes:
        transport, control: The communicator's transport and control handle; `Engine.wrap` replaces them.
        activity: As passed.
    """

    def __init__(self, transport: Transport, control: ControlPlane, activity: Activity, backend: str) -> None:
        self.transport: Transport = transport
        self.control: ControlPlane = control
        self.activity: Activity = activity
        self._life = activity.life
        self._group = activity.group
        self._backend = backend
        # `_differed`: a background comparison of collectives has failed. `_raised`: the program has seen an error of
        # the group.
        self._differed = False
        self._raised = False
        self._process = os.getpid()
        invalidate_after_fork(self)

    # -- whether calls can be made -------------------------------------------------------------
    def check(self, operation: str | None) -> None:
        """Raise if no more calls can be made; the error names this operation."""
        error = self.error(operation)
        if error is not None:
            raise error

    def check_open(self, operation: str) -> None:
        """Raise if the communicator is closed, but not if it is only broken."""
        if self._life.closed:
            self.check(operation)

    def error(self, operation: str | None = None) -> CommError | None:
        """Return the error that further calls would raise, naming this operation; None while calls can be made."""
        cause = self._life.cause
        self._raised = self._raised or cause is not None
        if self._life.closed:
            return self.with_context(ClosedError("the communicator is closed; create a new communicator"), operation)
        return None if cause is None else self.with_context(error_of(cause, self._group), operation)

    def with_context(self, error: CommError, operation: str | None, call: int | None = None) -> CommError:
        """Return the error with its context: rank, location, and call number (by default, the next one)."""
        if call is None and operation is not None:
            # Messages and collectives are numbered separately.
            call = 1 + (self.activity.messages if operation in _MESSAGES else self.activity.calls)
        group = self._group
        return error.locate(rank=group.rank, size=group.size, group=group.text, operation=operation, call=call)

    # -- causes --------------------------------------------------------------------------------
    def fail(self, cause: Cause) -> None:
        """Break the group, and end every wait in it.

        `fail` has no effect on a broken group, or on a closed group with no call in flight.

        Callable from any thread: the control plane's thread calls `fail` for a failure detected elsewhere, a caller's
        thread for its own error or `abort`, and the helper thread for an error in an asynchronous collective.
        """
        if HOLD.holds(self.activity):
            # Release held ranks first, because ranks do not notice a failure while they are held.
            HOLD.go()
        if self._life.change("fail", cause):
            self.transport.abort(error_of(cause, self._group))

    def invalidate_after_fork(self) -> None:
        """Mark the communicator as broken in a forked child: the parent still uses the connections and shared memory.

        The transport is not aborted, because the parent still uses it.
        """
        whose = f"this communicator belongs to process {self._process}, of which this process is a fork"
        text = f"{whose}; create a new communicator here, or start processes with spawn or forkserver"
        self._life.fail_after_fork(Cause("CommError", None, text))

    # -- this rank's errors --------------------------------------------------------------------
    def report(self, error: BaseException, operation: str | None, call: int | None = None) -> BaseException:
        """Break the group because of an error; return the error to raise: this one, or the group's first error.

        Args:
            error: Error raised by the operation, or by the program itself.
            operation: Name of the operation; None for the program.
            call: Number of the call; the next number if None.
        """
        self._raised = True
        return self._report(error, operation, call)

    def report_later(self, error: BaseException, fingerprint: Fingerprint) -> None:
        """Break the group for a mismatch found while a collective ran; the next collective, or `settle`, raises it."""
        if not self._life.closed:
            # Set `_differed` before the group breaks, because `settle` may be called at any time.
            self._differed = True
            # If the control plane is lost, its loss is already recorded as the first cause.
            with suppress(CommError):
                self._report(error, fingerprint.operation, fingerprint.call)

    def settle(self) -> None:
        """Raise a mismatch found in the background, unless the program has seen it; called before `close`."""
        if self._differed and not self._raised:
            self.check("close")

    def _report(self, error: BaseException, operation: str | None, call: int | None) -> BaseException:
        where = operation or "the program"
        if operation is not None and self._life.cause is not None and isinstance(error, CommError):
            # The transport may keep this error, and raise it again in other calls. Without an operation, the error is
            # leaving the program; the call that raised it has already copied it.
            error = detached(error)
        if not self._life.closed:
            self.activity.log_event("error", f"{type(error).__name__} in {where}: {text_of(error)}".partition("\n")[0])
        if self._life.cause is None:
            timed_out = isinstance(error, CommTimeoutError)
            if timed_out and os.environ.get(_ON_TIMEOUT) == "debug" and can_hold(self._backend):
                hold_ranks(self.control, self.activity, f"timed out in {where}: {text_of(error)}".partition("\n")[0])
            self.activity.fail(timed_out=timed_out)
            error = with_hang_report(error, self.control, self._group)
        own = to_cause(error, self._group.rank, where)
        first = self._life.cause or self._first_cause(own, error)
        if not isinstance(error, CommError):
            return error
        return self.with_context(error if first == own else _first_error(error, first, self._group), operation, call)

    def _first_cause(self, own: Cause, error: BaseException) -> Cause:
        """Report `own` unless the group has already failed; break the communicator; return the first failure."""
        anonymous = isinstance(error, PeerLostError) and error.peer is None
        known = self.control.first_cause(self._group, _PATIENCE_S if anonymous else 0.0)
        first = known or self.control.report_failure(self._group, own)
        self.fail(first)
        return first


def _first_error(error: CommError, first: Cause, group: Group) -> CommError:
    """Return the error to raise for the group's first failure, which has caused this rank's own error."""
    if isinstance(error, CommTimeoutError) and type(error).__name__ == first.kind:
        # Use the hang report of the first error: by the time of a later report, ranks may have continued.
        if "\n" in first.message:
            error.message = error.message.partition("\n")[0] + "\n" + first.message.partition("\n")[2]
        return error
    # Prefer the first report of a lost rank, which has the original exception; later reports only say that the rank
    # left.
    if isinstance(error, AbortedError) or (type(error).__name__ == first.kind and not isinstance(error, PeerLostError)):
        return error
    reported = error_of(first, group)
    reported.__cause__ = error
    return reported
