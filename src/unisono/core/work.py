"""Ready-made kinds of `Work`: one that somebody completes, and one that is over already."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from numbers import Real
from typing import TYPE_CHECKING

from unisono.core.types import Message, Recv, Work
from unisono.errors import CommTimeoutError, MismatchError

if TYPE_CHECKING:
    import torch

__all__ = [
    "Completion",
    "CountdownWork",
    "describe",
    "elements",
    "format_bytes",
    "resolve_timeout",
    "size_error",
    "timeout_error",
    "wait_any",
]


_LONGEST_S = 1e9
"""About 30 years: no system's clock and no way to wait overflows by it."""


class Completion(Work):
    """Work that its maker completes by `complete`, once, from any thread.

    Args:
        timeout_s: How long `wait` waits unless it is told otherwise.
        messages: What is waited for, for the text of a timeout.
    """

    def __init__(self, timeout_s: float, messages: Sequence[Message] = ()) -> None:
        self.timeout_s = timeout_s
        self._messages = list(messages)
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def complete(self, error: BaseException | None = None) -> bool:
        """End the work; False if it had ended before (the first outcome stays)."""
        with self._lock:
            if self._done.is_set():
                return False
            self._error = error
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
        return True

    def wait(self, timeout: float | None = None) -> None:
        limit = resolve_timeout(timeout, self.timeout_s)
        if not self._done.is_set():
            started = time.monotonic()
            if not self._done.wait(limit):
                raise timeout_error(self._messages, time.monotonic() - started)
        if self._error is not None:
            raise self._error

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
        """Call `callback` when the work ends, in the thread that ends it; at once if it has ended."""
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
                self._messages.remove(message)
        if not self._messages:
            self.complete()


def resolve_timeout(timeout: float | None, usual_s: float) -> float:
    """How many seconds a wait may take: those that were told, or the usual ones.

    Raises:
        TypeError: It is no number; a timedelta has `total_seconds()`.
        ValueError: It is negative, or more than 1e9, such as infinity.

    Example:
        >>> resolve_timeout(None, 300.0), resolve_timeout(5, 300.0)
        (300.0, 5)
    """
    if timeout is None:
        return usual_s
    if not isinstance(timeout, Real):
        hint = "; give its total_seconds()" if isinstance(timeout, timedelta) else ""
        raise TypeError(f"timeout is a number of seconds, not a {type(timeout).__name__}{hint}")
    if not 0 <= timeout <= _LONGEST_S:
        raise ValueError(f"timeout must be from 0 to 1e9 seconds, not {timeout!r}")
    return timeout


def timeout_error(messages: Sequence[Message], waited_s: float) -> CommTimeoutError:
    """The error of a wait for these messages that has taken too long."""
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
    """What is waited for, in words: "for 4.0 MiB from rank 1"."""
    parts = [
        f"for {format_bytes(m.tensor.nbytes)} from rank {m.peer}"
        if isinstance(m, Recv)
        else f"for rank {m.peer} to take {format_bytes(m.tensor.nbytes)}"
        for m in messages[:4]
    ]
    return " and ".join(parts) + (f" and {len(messages) - 4} more" if len(messages) > 4 else "")


def size_error(sender: int, sent: str, receiver: int, expected: str, tag: int, peer: int) -> MismatchError:
    """The error of a send and a receive that met and do not fit; `sent` and `expected` as of `elements`."""
    return MismatchError(
        f"rank {sender} sent {sent}, but the receive on rank {receiver} is for {expected} (tag {tag})", peer=peer
    )


def elements(numel: int, dtype: str) -> str:
    """A tensor's content in words.

    Example:
        >>> elements(4, "torch.float32")
        '4 elements of float32'
    """
    return f"{numel} elements of {dtype.removeprefix('torch.')}"


def format_bytes(nbytes: int) -> str:
    """A number of bytes for people.

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


def wait_any(works: Sequence[Work], timeout: float | None = None) -> int:
    """The index of a work that has ended; waits for the first one to end.

    Needs nothing of a transport but `get_future`. Raises `CommTimeoutError` after `timeout` seconds,
    and `ValueError` for no works. It does not raise the work's own error: call its `wait`.
    """
    if not works:
        raise ValueError("wait_any needs at least one work")
    limit = None if timeout is None else resolve_timeout(timeout, timeout)
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
        raise CommTimeoutError(f"waited {timeout} s for any of {len(works)} works", waited_s=timeout) from None
