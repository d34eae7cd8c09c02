"""Who waits for an answer of the control plane, and who is to be told of a group's failure."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from unisono.control.base import Cause
from unisono.control.groups import Reply
from unisono.group import Group

__all__ = ["Callback", "Membership", "Waiter"]

Callback = Callable[[], None]


class Waiter:
    """One request under way. A bare lock: nothing else in Python wakes another thread as fast."""

    __slots__ = ("_lock", "number", "reply")

    def __init__(self, number: int) -> None:
        self.number = number
        self.reply: Reply | None = None
        self._lock = threading.Lock()
        self._lock.acquire()

    def answer(self, reply: Reply) -> None:
        """The first answer counts."""
        if self.reply is None:
            self.reply = reply
            self.wake()

    def wake(self) -> None:
        """Let who sleeps look around."""
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    def sleep(self, timeout: float) -> None:
        """Until the answer is there, or somebody wakes this thread, or the time is up."""
        if self.reply is None:
            self._lock.acquire(timeout=min(max(timeout, 0.0), threading.TIMEOUT_MAX))


class Membership:
    """This rank's presence in one group."""

    def __init__(self, group: Group, on_failure: Callable[[Cause], None] | None) -> None:
        self.group = group
        self.cause: Cause | None = None
        self.told = threading.Event()
        self._on_failure = on_failure
        self._lock = threading.Lock()

    def fail(self, cause: Cause) -> Callback | None:
        """Keep the first cause; what is then to be called, outside of any lock."""
        with self._lock:
            if self.cause is not None:
                return None
            self.cause = cause
        self.told.set()
        on_failure = self._on_failure
        return None if on_failure is None else lambda: on_failure(cause)
