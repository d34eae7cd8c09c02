"""Teardown of a communicator, after `close` or after its last reference is dropped."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence

from unisono.comm.failures import Failures
from unisono.control.process_exit import close_at_exit
from unisono.core.failure import to_cause
from unisono.core.group import Group
from unisono.core.threads import SerialWorker, spawn_thread
from unisono.errors import CommError

__all__ = ["CLOSE_S", "Teardown"]

CLOSE_S = 1.0
"""Maximum number of seconds that a closing communicator waits for the other ranks to leave."""
_AT_EXIT_S = 5.0


class Teardown:
    """All resources of a communicator, without a reference to it, so that they can outlive the communicator.

    A top-level communicator without references is closed in the background, as if by `close`. A subgroup without
    references is kept for now, because its messages may still be in flight, and other ranks may still use it. The
    subgroup is released once all its ranks have dropped it, or with its parent at the latest. Whenever the parent is
    split again, each rank reports the subgroups that it has dropped.

    Args:
        failures: The communicator's `Failures`, which also holds its transport and control handle. Not kept alive: it
            exists as long as the program refers to the communicator.
        helper: Thread to stop.
        timeout_s: Seconds to wait for the helper thread.

    Attributes:
        closers: Further functions to call at the end.
        over: Whether teardown has run, or has been left to the communicator that replaces this one.
        dropped: Whether the communicator has lost its last reference without being closed.
    """

    def __init__(self, failures: Failures, helper: SerialWorker, timeout_s: float) -> None:
        self._failures = weakref.ref(failures)
        self._transport = failures.transport
        self._control = failures.control
        self._helper = helper
        self._timeout_s = timeout_s
        self.group: Group = failures.transport.group
        self.closers: list[Callable[[], None]] = []
        self.over: bool = False
        self.dropped: bool = False
        self._is_part = False
        self._parts: list[Teardown] = []
        self._settled = threading.Event()
        self._process = os.getpid()
        # Don't close simulated communicators at exit: their threads end with the simulation, which must not depend on
        # when memory is freed.
        if not failures.control.simulated:
            close_at_exit(self)

    def close(self, patience: float) -> None:
        """Wait for the calls in the helper thread, then release everything, including the subgroups still open.

        Args:
            patience: Maximum number of seconds to wait for the other ranks to leave. They are not waited for if the
                group has failed, unless the communicator has been dropped.
        """
        # A communicator that the program has dropped stays open, because reports list a failed one only until it is
        # closed; see `Activity.fail`.
        failures = self._failures()
        activity = None if failures is None else failures.activity
        if activity is not None:
            activity.life.change("close")
            if activity.life.cause is None:
                activity.log_event("end", "closed")
        self.over = True
        if os.getpid() != self._process:
            # In a forked child, all resources belong to the parent process, which continues.
            self._close_parts()
            return
        self._helper.end()
        self._helper.join(self._timeout_s)
        if activity is not None:
            # No call is in flight any more, so a later failure has no call to abort.
            activity.life.change("drain")
            patience = 0.0 if activity.life.cause is not None else patience
        # If the control plane has already ended, no rank can be notified.
        with contextlib.suppress(CommError):
            self._transport.leave()
            # `leave` notifies waiting ranks immediately, but returns only when all ranks have left or `patience` has
            # passed, so that messages in flight are not cut off.
            self._control.leave(self.group, patience)
        self._transport.close()
        self._close_parts()
        for closer in self.closers:
            closer()

    def _close_parts(self) -> None:
        for part in self.left():
            part.close(0.0)

    # -- subgroups -----------------------------------------------------------------------------
    def adopt(self, part: Teardown) -> None:
        """Register a subgroup, to be released with this communicator at the latest."""
        part._is_part = True
        self._parts = [*self.left(), part]

    def inherit(self, other: Teardown) -> None:
        """Take over the closers and subgroups of another teardown."""
        self.closers = other.closers
        other.closers = []
        self._parts = other.left()
        other._parts = []

    def left(self) -> list[Teardown]:
        """Return the open subgroups."""
        return [part for part in self._parts if not part.over]

    def dropped_parts(self) -> list[str]:
        """Return the names of the open subgroups that nothing references any more."""
        return [part.group.name for part in self.left() if part.dropped]

    def release(self, dropped_by_rank: Sequence[Sequence[str]]) -> None:
        """Close each subgroup that all of its ranks have reported as dropped."""
        members = self.group.members
        for part in self.left():
            ranks = [members.index(member) for member in part.group.members if member in members]
            if len(ranks) == part.group.size and all(part.group.name in dropped_by_rank[rank] for rank in ranks):
                part.close(0.0)

    def fail(self, error: BaseException) -> None:
        """Report an error to the ranks of dropped subgroups, because some of them may be waiting for this rank."""
        for part in self.left():
            if part.dropped:
                with contextlib.suppress(CommError):
                    self._control.report_failure(part.group, to_cause(error, part.group.rank, "the program"))

    # -- no references left --------------------------------------------------------------------
    def drop(self) -> None:
        """Mark as dropped, unless closed or retired. Called in finalizers.

        Takes no lock, because this thread may hold the control plane's lock.
        """
        if self.over or self._control.simulated or os.getpid() != self._process:
            return
        self.dropped = True
        self._helper.end()
        if not self._is_part:
            spawn_thread(self._settle, f"unisono end of {self.group.name}")

    def _settle(self) -> None:
        try:
            self.close(CLOSE_S)
        finally:
            self._settled.set()

    def on_process_exit(self, error: BaseException | None) -> None:
        """Before the process exits, finish a teardown in progress, or notify the ranks that wait for this one."""
        if os.getpid() != self._process:
            return
        if self.dropped and not self._is_part:
            self._settled.wait(_AT_EXIT_S)
        elif error is None and not self.over:
            self._transport.leave()
