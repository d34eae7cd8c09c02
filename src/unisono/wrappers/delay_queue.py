"""A queue that delays sends until they are due."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.core import clock
from unisono.core.threads import DaemonThreadPool
from unisono.core.transport import Transport
from unisono.core.types import Send, Work
from unisono.core.work import CountdownWork

__all__ = ["DelayQueue", "DelayedSend", "Stream"]

Stream = tuple[int, int]
"""A destination rank and a tag. Backends preserve the order of messages within a stream."""


@dataclass(slots=True)
class DelayedSend:
    """A message to send later.

    Attributes:
        send: The message.
        due: Send time, on the library's clock.
        swap: Whether the stream's next message, if posted before `due`, overtakes this message.
    """

    send: Send
    due: float
    swap: bool = False


class DelayQueue:
    """Sends messages when they are due, in posting order per rank and tag.

    There is one thread per stream with waiting messages; an idle thread ends after 5 s.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._threads = DaemonThreadPool(f"unisono late messages {inner.group.name}")
        self._changed = threading.Condition()
        self._streams: dict[Stream, deque[tuple[DelayedSend, CountdownWork]]] = {}
        self._cause: BaseException | None = None

    def queued(self, stream: Stream) -> bool:
        """Return whether messages of this stream are still waiting."""
        with self._changed:
            return stream in self._streams

    def post(self, messages: Sequence[DelayedSend]) -> Work:
        """Send each message when due, with the inner transport's timeout. The work completes after all sends."""
        work = CountdownWork(threading.TIMEOUT_MAX, [held.send for held in messages])
        for held in messages:
            stream = (held.send.peer, held.send.tag)
            with self._changed:
                waiting = self._streams.setdefault(stream, deque())
                waiting.append((held, work))
                served = len(waiting) > 1
                self._changed.notify_all()
            if not served:
                # Mypy cannot infer the type of a lambda's default argument.
                self._threads.run(lambda stream=stream: self._serve(stream))  # type: ignore[misc]
        return work

    def _serve(self, stream: Stream) -> None:
        while True:
            held, work = self._next(stream)
            try:
                if self._cause is not None:
                    raise self._cause
                self._inner.post([held.send]).wait()
            except BaseException as error:
                # Don't raise here: the sender's wait raises the error.
                work.complete(error)
            else:
                work.arrived(held.send)
            with self._changed:
                self._streams[stream].popleft()
                if not self._streams[stream]:
                    del self._streams[stream]
                    return

    def _next(self, stream: Stream) -> tuple[DelayedSend, CountdownWork]:
        """Wait until a message is due, and return it. The message remains at the head of its stream."""
        with self._changed:
            waiting = self._streams[stream]
            while True:
                held, work = waiting[0]
                if held.swap and len(waiting) > 1:
                    waiting[0], waiting[1] = waiting[1], waiting[0]
                    for passing in (held, waiting[0][0]):
                        passing.swap = False
                        passing.due = 0.0
                    continue
                left_s = held.due - clock.now()
                if left_s <= 0 or self._cause is not None:
                    return held, work
                self._changed.wait(left_s)

    def stop(self, cause: BaseException) -> None:
        """Fail all unsent messages immediately."""
        with self._changed:
            self._cause = self._cause or cause
            waiting = [work for stream in self._streams.values() for _, work in stream]
            self._changed.notify_all()
        for work in waiting:
            work.complete(self._cause)
