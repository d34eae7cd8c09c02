"""Frames of the control plane as a rank receives them: answers to its requests, and news of failures."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from functools import partial

from unisono import serialization
from unisono.control.state import Reply
from unisono.core.failure import Cause
from unisono.core.group import Group

__all__ = ["Callback", "Membership", "PendingRequest", "news_of", "reply_of"]

Callback = Callable[[], None]


def reply_of(content: bytes) -> Reply:
    """Return the answer in a frame of the first connection, which may hold values of any rank.

    Raises:
        ValueError: No server sends such a frame.
    """
    match serialization.decode(content):
        case number, "ok", body if number and type(number) is int:
            return number, "ok", body
        case number, "failed", (str(kind), rank, str(message)) if number and type(number) is int and _is_rank(rank):
            return number, "failed", (kind, rank, message)
    raise ValueError("a malformed reply")


def news_of(content: bytes) -> Reply:
    """Return the news in a frame of the second connection: in JSON, so that a failure is reported in few steps.

    Raises:
        ValueError: No server sends such a frame.
    """
    try:
        news = json.loads(content)
    except RecursionError:
        raise ValueError("a malformed notification") from None
    match news:
        case "failed", (str(name), str(kind), rank, str(message)) if _is_rank(rank):
            return 0, "failed", (name, kind, rank, message)
        case ("asked", int(body)) | ("goodbye", None as body):
            return 0, news[0], body
    raise ValueError("a malformed notification")


def _is_rank(value: object) -> bool:
    """Return whether a value can be the rank of a cause: an exact int, or None."""
    return value is None or type(value) is int


class PendingRequest:
    """A request under way. A bare lock: nothing else in Python wakes another thread as fast."""

    __slots__ = ("_lock", "number", "reply")

    def __init__(self, number: int) -> None:
        self.number = number
        self.reply: Reply | None = None
        self._lock = threading.Lock()
        self._lock.acquire()

    def answer(self, reply: Reply) -> None:
        """Set the answer. The first one counts."""
        if self.reply is None:
            self.reply = reply
            self.wake()

    def wake(self) -> None:
        """End the sleep of the thread that waits."""
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    def sleep(self, timeout: float) -> None:
        """Wait until the answer is there, another thread calls `wake`, or the time is up."""
        if self.reply is None:
            self._lock.acquire(timeout=min(max(timeout, 0.0), threading.TIMEOUT_MAX))


class Membership:
    """This rank's presence in one group."""

    def __init__(self, group: Group, on_failure: Callable[[Cause], None] | None) -> None:
        self.group = group
        self.cause: Cause | None = None
        self.failed = threading.Event()
        self._on_failure = on_failure
        self._lock = threading.Lock()

    def fail(self, cause: Cause) -> Callback | None:
        """Keep the first cause, and return the callback for it, to be called outside of any lock."""
        with self._lock:
            if self.cause is not None:
                return None
            self.cause = cause
        self.failed.set()
        on_failure = self._on_failure
        return None if on_failure is None else partial(on_failure, cause)
