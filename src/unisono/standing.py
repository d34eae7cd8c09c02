"""Whether the calls of a group can be made, and the first cause of its failure."""

from __future__ import annotations

import os
import threading
from threading import get_ident

from unisono.activity import Activity
from unisono.control import Cause, Control, error_of
from unisono.control.failure import text_of
from unisono.control.sockets import close_after_fork
from unisono.errors import AbortedError, ClosedError, CommError, CommTimeoutError, PeerLostError
from unisono.failing import cause_of, explained
from unisono.transport import Options, Transport

__all__ = ["ANYONE", "Standing"]

ANYONE = -1
"""In the place of the owning thread's number: whoever calls may."""

_MESSAGES = frozenset({"send", "recv", "isend", "irecv", "sendrecv", "batch_isend_irecv", "probe", "iprobe"})
_PATIENCE_S = 1.0
"""How long a broken connection waits to be told, over the control plane, who was lost."""


class Standing:
    """One rank's place in its group: what it holds on to, what it is doing, and whether the group still works.

    Attributes:
        transport, control, options: As they were given.
        group: The ranks.
        activity: What this rank is doing.
        owner: The thread that makes calls; None before the first one.
        closed: Whether this rank has let go of it.
    """

    def __init__(self, transport: Transport, control: Control, options: Options) -> None:
        self.transport, self.control, self.options = transport, control, options
        self.group = transport.group
        self.activity = Activity(self.group)
        self.owner: int | None = None
        self.closed = False
        self._broken: Cause | None = None
        self._calls = 0
        self._process = os.getpid()
        close_after_fork(self)

    def let_go(self) -> None:
        """In a forked child: connections and shared memory are the parent's, which goes on with them."""
        told = f"this communicator belongs to process {self._process}, of which this one is a fork"
        self._broken = Cause(
            "CommError", None, f"{told}; make a new one here, or start processes by spawn or forkserver"
        )

    @property
    def open(self) -> bool:
        """Whether calls can be made."""
        return self._broken is None and not self.closed

    @property
    def unfinished(self) -> bool:
        """Whether something is under way that was started before the end."""
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
        if self.owner not in (here, ANYONE):
            error = CommError(
                f"this communicator belongs to another thread than {threading.current_thread().name!r}; "
                "call hand_over() there first, or use dup() for a second communicator"
            )
            raise self.located(error, operation)

    def check(self, operation: str) -> None:
        """Raise if nothing can be called any more."""
        if self.closed:
            raise self.located(ClosedError("the communicator is closed; make a new one"), operation)
        if self._broken is not None:
            raise self.located(error_of(self._broken, self.group), operation)

    def on_failure(self, cause: Cause) -> None:
        """What the control plane calls, from its own thread, when the group has failed."""
        if self._broken is None and (self.unfinished or not self.closed):
            self._broken = cause
            self.activity.broken = True
            self.transport.abort(error_of(cause, self.group))

    def failed(self, error: BaseException, operation: str, call: int | None = None) -> BaseException:
        """Break the group for this error, and return the error to raise: the group's first cause."""
        if not self.closed:
            self.activity.tell("error", f"{type(error).__name__} in {operation}: {text_of(error)}".partition("\n")[0])
        if self._broken is None:
            self.activity.gave_up = isinstance(error, CommTimeoutError)
            error = explained(error, self.control, self.group)
        cause = cause_of(error, self.group.rank, operation)
        anonymous = isinstance(error, PeerLostError) and error.peer is None
        known = self._broken or self.control.cause(self.group, _PATIENCE_S if anonymous else 0.0)
        first = known or self.control.fail(self.group, cause)
        self.on_failure(first)
        if not isinstance(error, CommError):
            return error
        # Of a lost rank, whoever was first told more: what it failed by, where others see only that it has left.
        same = type(error).__name__ == first.kind and not isinstance(error, PeerLostError)
        as_good = isinstance(error, AbortedError) or same
        if first != cause and not as_good:
            told = error_of(first, self.group)
            told.__cause__ = error
            error = told
        elif first != cause and isinstance(error, CommTimeoutError) and "\n" in first.message:
            # By the time of a later report, whoever is to blame may have been told already, and be elsewhere.
            error.message = error.message.partition("\n")[0] + "\n" + first.message.partition("\n")[2]
        return self.located(error, operation, call)

    def located(self, error: CommError, operation: str, call: int | None = None) -> CommError:
        """The error, with what is known here: who, where, and the number that the call has, or would have got."""
        if call is None:
            # Messages are counted by themselves.
            call = 1 + (self.activity.messages if operation in _MESSAGES else self._calls)
        group = self.group
        return error.locate(rank=group.rank, size=group.size, group=group.name, operation=operation, call=call)
