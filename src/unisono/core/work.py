"""Basic kinds of `Work`: one that another thread completes, and one that is complete already."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from numbers import Real
from typing import TYPE_CHECKING

from unisono.core.types import Message, Recv, Timeout, Work
from unisono.errors import CommTimeoutError, MismatchError

if TYPE_CHECKING:
    import torch

__all__ = [
    "Completion",
    "CountdownWork",
    "describe",
    "elements",
    "format_bytes",
    "positive_timeout",
    "resolve_timeout",
    "size_error",
    "timeout_error",
    "wait_any",
]


_LONGEST_S = 1e9
"""About 30 years: no system's clock and no way to wait overflows by it."""


class Completion(Work):
    """Work that its creator completes by `complete`, once, from any thread.

    Args:
        timeout_s: Default timeout of `wait`.
        messages: The awaited messages, for the text of a timeout.
    """

    def __init__(self, timeout_s: float, messages: Sequence[Message] = ()) -> None:
        self.timeout_s = timeout_s
        # Counted, because a message may be posted twice.
        self._left: dict[Message, int] = {}
        for message in messages:
            self._left[message] = self._left.get(message, 0) + 1
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def complete(self, error: BaseException | None = None) -> bool:
        """End the work; return False if it had ended before (the first outcome stays)."""
        with self._lock:
            if self._done.is_set():
                return False
            self._error = error
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
        return True

    def wait(self, timeout: Timeout | None = None) -> None:
        limit = resolve_timeout(timeout, self.timeout_s)
        if not self._done.is_set():
            started = time.monotonic()
            if not self._done.wait(limit):
                raise timeout_error(self._messages, time.monotonic() - started)
        if self._error is not None:
            raise self._error

    @property
    def _messages(self) -> list[Message]:
        """The messages that have not arrived."""
        return [message for message, count in tuple(self._left.items()) for _ in range(count)]

    def is_completed(self) -> bool:
        return self._done.is_set()

    def exception(self) -> BaseException | None:
        return self._error

    def get_future(self) -> torch.futures.Future[None]:
        import torch

        future: torch.futures.Future[None] = torch.futures.Future()

        def settle() -> None:
            if self._error is None:
                future.set_result(None)
            else:
                future.set_exception(self._error)  # type: ignore[arg-type]

        self.when_done(settle)
        return future

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the work ends, in the thread that ends it; immediately if it has ended."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback()


class CountdownWork(Completion):
    """The messages of one `post`: complete when each has `arrived`, or with the first error."""

    def __init__(self, timeout_s: float, messages: Sequence[Message]) -> None:
        super().__init__(timeout_s, messages)
        if not messages:
            self.complete()

    def arrived(self, message: Message) -> None:
        """Note that one of the messages is done; call once for each."""
        with self._lock:
            if not self._done.is_set():
                self._left[message] -= 1
                if not self._left[message]:
                    del self._left[message]
        if not self._left:
            self.complete()


def resolve_timeout(timeout: Timeout | None, default_s: float = 0.0) -> float:
    """Return the timeout of a wait in seconds: the given one, or the default if it is None.

    Raises:
        TypeError: It is neither a number of seconds nor a timedelta.
        ValueError: It is negative, or more than 1e9 seconds, such as infinity.

    Example:
        >>> resolve_timeout(None, 300.0), resolve_timeout(5, 300.0), resolve_timeout(timedelta(minutes=1), 300.0)
        (300.0, 5, 60.0)
    """
    if timeout is None:
        return default_s
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, Real):
        raise TypeError(f"timeout must be a number of seconds or a timedelta, not a {type(timeout).__name__}")
    if not 0 <= seconds <= _LONGEST_S:
        raise ValueError(f"timeout must be from 0 to 1e9 seconds, not {timeout!r}")
    return seconds


def positive_timeout(timeout: Timeout) -> float:
    """Return the timeout in seconds, as `resolve_timeout`; raise `ValueError` also if it is 0.

    Example:
        >>> positive_timeout(timedelta(seconds=0))
        Traceback (most recent call last):
        ...
        ValueError: timeout must be a positive number of seconds or a timedelta, not datetime.timedelta(0)
    """
    seconds = resolve_timeout(timeout)
    if not seconds > 0:
        raise ValueError(f"timeout must be a positive number of seconds or a timedelta, not {timeout!r}")
    return seconds


def timeout_error(messages: Sequence[Message], waited_s: float) -> CommTimeoutError:
    """Return the timeout error of a wait for these messages."""
    if not messages:
        return CommTimeoutError(f"waited {waited_s:.1f} s", waited_s=waited_s)
    first = messages[0]
    return CommTimeoutError(
        f"waited {waited_s:.1f} s {describe(messages)}. Is rank {first.peer} alive, or did it skip a call?",
        peer=first.peer,
        nbytes=first.tensor.nbytes,
        waited_s=waited_s,
    )


def describe(messages: Sequence[Message]) -> str:
    """Return the awaited messages as text: "for 4.0 MiB from rank 1"."""
    parts = [
        f"for {format_bytes(m.tensor.nbytes)} from rank {m.peer}"
        if isinstance(m, Recv)
        else f"for rank {m.peer} to receive {format_bytes(m.tensor.nbytes)}"
        for m in messages[:4]
    ]
    return " and ".join(parts) + (f" and {len(messages) - 4} more" if len(messages) > 4 else "")


def size_error(sender: int, sent: str, receiver: int, expected: str, tag: int, peer: int) -> MismatchError:
    """Return the error of a matched send and receive that differ; `sent` and `expected` are as from `elements`."""
    return MismatchError(
        f"rank {sender} sent {sent}, but the receive on rank {receiver} expects {expected} (tag {tag})", peer=peer
    )


def elements(numel: int, dtype: str) -> str:
    """Return a description of a tensor's content.

    Example:
        >>> elements(4, "torch.float32")
        '4 elements of float32'
    """
    return f"{numel} elements of {dtype.removeprefix('torch.')}"


def format_bytes(nbytes: int) -> str:
    """Return a human-readable number of bytes.

    Example:
        >>> format_bytes(100), format_bytes(4 << 20)
        ('100 B', '4.0 MiB')
    """
    if nbytes < 1024:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024 or unit == "GiB":
            break
    return f"{size:.1f} {unit}"


def wait_any(works: Sequence[Work], timeout: Timeout | None = None) -> int:
    """Wait for the first work to end, and return its index.

    Needs nothing of a transport but `get_future`. Raises `CommTimeoutError` after `timeout`,
    and `ValueError` for no works. It does not raise the work's own error: call its `wait`.
    """
    if not works:
        raise ValueError("wait_any needs at least one work")
    limit = None if timeout is None else resolve_timeout(timeout)
    for index, work in enumerate(works):
        if work.is_completed():
            return index
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    def noting(index: int) -> Callable[[object], None]:
        return lambda _: ended.put(index)

    for index, work in enumerate(works):
        work.get_future().add_done_callback(noting(index))
    try:
        return ended.get(timeout=limit)
    except queue.Empty:
        raise CommTimeoutError(f"waited {limit} s for any of {len(works)} works", waited_s=limit) from None
