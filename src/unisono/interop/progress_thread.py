"""Progress of messages that no thread waits for."""

from __future__ import annotations

import threading
from collections import deque

from unisono.core.types import Work

__all__ = ["Progress"]

_GRACE_S = 0.005


class Progress:
    """Background progress of messages, which torch's users rely on and not every transport makes by itself.

    For 5 ms a message is left to its waiter. If it is not done then, it gets a thread of its own, through
    its future.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._posted: deque[Work] = deque()
        self._some = threading.Event()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def watch(self, work: Work) -> None:
        """Take care of a work, unless it is done already."""
        if work.is_completed():
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._look_after, name=self._name, daemon=True)
            self._thread.start()
        self._posted.append(work)
        self._some.set()

    def close(self) -> None:
        """Look after nothing any more."""
        self._over.set()
        self._some.set()

    def _look_after(self) -> None:
        while self._some.wait() and not self._over.wait(_GRACE_S):
            self._some.clear()
            while self._posted:
                work = self._posted.popleft()
                if not work.is_completed():
                    work.get_future()
