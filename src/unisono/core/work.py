"""Basic classes of `Work`, for example work that another thread completes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Generic, TypeVar

from unisono.core import clock
from unisono.core.failure import raise_caused, waited_for
from unisono.core.threads import DaemonThreadPool
from unisono.core.types import Message, Recv, Timeout, Work
from unisono.errors import CommTimeoutError, MismatchError

if TYPE_CHECKING:
    import torch

__all__ = [
    "ChainedWork",
    "Completion",
    "CountdownWork",
    "Deferred",
    "ResultWork",
    "WorkGroup",
    "describe",
    "elements",
    "format_bytes",
    "missing_ranks_error",
    "positive_timeout",
    "raised_by",
    "resolve_timeout",
    "seconds_left",
    "size_error",
    "timeout_error",
    "wait_any",
]

_LONGEST_S = 1e9
"""About 30 years, which doesn't overflow any system's clock or wait function."""


class Completion(Work):
    """Work that its creator completes once with `complete`, from any thread.

    Args:
        timeout_s: Default timeout of `wait`.
        messages: Awaited messages, for the text of a timeout error.
    """

    def __init__(self, timeout_s: float, messages: Sequence[Message] = ()) -> None:
        self.timeout_s = timeout_s
        # Values are counts, because a message may be posted twice.
        self._left: dict[Message, int] = {}
        for message in messages:
            self._left[message] = self._left.get(message, 0) + 1
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    @classmethod
    def ended(cls, error: BaseException | None = None) -> Completion:
        """Return a work that has already ended, with an error if one is passed."""
        work = Completion(0.0)
        work.complete(error)
        return work

    def complete(self, error: BaseException | None = None) -> bool:
        """End the work; return False if it had already ended (the first outcome stands)."""
        with self._lock:
            if self._done.is_set():
                return False
            self._error = error
            self._done.set()
            callbacks = self._callbacks
            self._callbacks = []
        for callback in callbacks:
            callback()
        return True

    def wait(self, timeout: Timeout | None = None) -> None:
        limit = resolve_timeout(timeout, self.timeout_s)
        if not self._done.is_set():
            started = clock.now()
            if not clock.wait(self._done, started + limit):
                raise timeout_error(self._messages, clock.now() - started)
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
    """Work for one `post`: completes once `arrived` has been called for each message, or fails with the first error."""

    def __init__(self, timeout_s: float, messages: Sequence[Message]) -> None:
        super().__init__(timeout_s, messages)
        if not messages:
            self.complete()

    def arrived(self, message: Message) -> None:
        """Record that a message is done; call once per message."""
        with self._lock:
            if not self._done.is_set():
                self._left[message] -= 1
                if not self._left[message]:
                    del self._left[message]
        if not self._left:
            self.complete()


def raised_by(call: Callable[[], object]) -> BaseException | None:
    """Return the error that a call raises, even an interrupt; None if it raises none."""
    try:
        call()
    except BaseException as error:
        return error
    return None


def resolve_timeout(timeout: Timeout | None, default_s: float = 0.0) -> float:
    """Return a wait's timeout in seconds: the given timeout, or the default if None.

    Raises:
        TypeError: `timeout` is neither a number of seconds nor a timedelta.
        ValueError: `timeout` is negative, or more than 1e9 seconds (or infinite).

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


def seconds_left(deadline: float) -> float:
    """Return the seconds until a deadline on the library's clock; 0 if it has passed."""
    return max(0.0, deadline - clock.now())


def positive_timeout(timeout: Timeout, name: str = "timeout") -> float:
    """Return the timeout in seconds, like `resolve_timeout`, but also raise `ValueError` if it is 0.

    Args:
        timeout: Seconds, or a timedelta.
        name: Name of the argument, for the error message.

    Example:
        >>> positive_timeout(timedelta(seconds=0))
        Traceback (most recent call last):
        ...
        ValueError: timeout must be a positive number of seconds or a timedelta, not datetime.timedelta(0)
    """
    seconds = resolve_timeout(timeout)
    if not seconds > 0:
        raise ValueError(f"{name} must be a positive number of seconds or a timedelta, not {timeout!r}")
    return seconds


def timeout_error(messages: Sequence[Message], waited_s: float) -> CommTimeoutError:
    """Return the timeout error for a wait for these messages."""
    if not messages:
        return CommTimeoutError(f"waited {waited_s:.1f} s", waited_s=waited_s)
    first = messages[0]
    return CommTimeoutError(
        f"waited {waited_s:.1f} s {describe(messages)}. Is rank {first.peer} alive, or did it skip a call?",
        peer=first.peer,
        nbytes=first.tensor.nbytes,
        waited_s=waited_s,
    )


def missing_ranks_error(waited_s: float, ranks: Sequence[int]) -> CommTimeoutError:
    """Return the timeout error for a wait for these ranks."""
    if not ranks:
        return timeout_error((), waited_s)
    return CommTimeoutError(waited_for(ranks, waited_s), peer=ranks[0], waited_s=waited_s)


def describe(messages: Sequence[Message]) -> str:
    """Describe the awaited messages: "for 4.0 MiB from rank 1"."""
    parts = [
        f"for {format_bytes(m.tensor.nbytes)} from rank {m.peer}"
        if isinstance(m, Recv)
        else f"for rank {m.peer} to receive {format_bytes(m.tensor.nbytes)}"
        for m in messages[:4]
    ]
    return " and ".join(parts) + (f" and {len(messages) - 4} more" if len(messages) > 4 else "")


def size_error(sender: int, sent: str, receiver: int, expected: str, tag: int, peer: int) -> MismatchError:
    """Return the error for a send whose tensor doesn't fit the receive; both sizes are texts from `elements`."""
    return MismatchError(
        f"rank {sender} sent {sent}, but the receive on rank {receiver} expects {expected} (tag {tag})", peer=peer
    )


def elements(numel: int, dtype: str) -> str:
    """Return a tensor's number of elements and dtype as text.

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
    """Wait until one of several pieces of work ends, and return its index.

    The function calls only `is_completed` and `get_future` of each piece of work. Raises `CommTimeoutError` after
    `timeout`, and `ValueError` for an empty list. If the work failed, only its own `wait` raises the error.
    """
    if not works:
        raise ValueError("wait_any needs at least one work")
    limit = None if timeout is None else resolve_timeout(timeout)
    for index, work in enumerate(works):
        if work.is_completed():
            return index
    first: list[int] = []
    ended = threading.Event()

    def note(index: int, _: object) -> None:
        first.append(index)
        ended.set()

    for index, work in enumerate(works):
        work.get_future().add_done_callback(partial(note, index))
    if limit is None:
        ended.wait()
    elif not clock.wait(ended, clock.now() + limit):
        raise CommTimeoutError(f"waited {limit} s for any of {len(works)} works", waited_s=limit)
    return first[0]


_threads = DaemonThreadPool("unisono deferred work")


class Deferred(Work):
    """Work that runs in the thread of the first `wait`.

    Args:
        run: Function that does the work, with a deadline on the library's clock.
        timeout_s: Default timeout of `wait`.
        ready: Function that returns whether `run` would return, or raise, immediately; None if unknown. A `wait` with a
            timeout starts `run` only when `ready` returns true, so that a wait that times out can be repeated.
    """

    def __init__(self, run: Callable[[float], None], timeout_s: float, ready: Callable[[], bool] | None = None) -> None:
        self._run = run
        self._timeout_s = timeout_s
        self._ready = ready
        self._lock = threading.Lock()
        self._over = False
        self._error: BaseException | None = None
        self._future: Completion | None = None

    def wait(self, timeout: Timeout | None = None) -> None:
        limit = resolve_timeout(timeout, self._timeout_s)
        if timeout is not None and self._ready is not None:
            started = clock.now()
            # Wait without the lock, because another thread may be in `run` meanwhile.
            ready = self._ready() or (limit > 0 and clock.poll_until(self._ready, started + limit, spins=0))
            if not ready:
                raise timeout_error((), clock.now() - started)
            limit = self._timeout_s
        with self._lock:
            if not self._over:
                self._over = True
                try:
                    self._run(clock.now() + limit)
                except BaseException as error:
                    # Store even an interrupt, because every later wait must report the same outcome.
                    self._error = error
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        if not self._over and self._ready is not None and self._ready():
            # No caller could catch an error here; the next wait reports it.
            raised_by(self.wait)
        return self._over and not self._lock.locked()

    def exception(self) -> BaseException | None:
        return self._error

    def get_future(self) -> torch.futures.Future[None]:
        if self._future is None:
            self._future = ended = Completion(self._timeout_s)
            _threads.run(lambda: ended.complete(raised_by(self.wait)))
        return self._future.get_future()


T = TypeVar("T")


class ChainedWork(Work):
    """Work that calls a function once other work has succeeded, and that translates the other work's errors.

    Args:
        inner: The work to continue.
        after: Called once, in the first thread that sees `inner` succeed; an error that it raises becomes the error of
            this work.
        translate: Converts an error of `inner` to the error to raise.
    """

    def __init__(
        self,
        inner: Work,
        after: Callable[[], object] | None = None,
        translate: Callable[[BaseException], BaseException] = lambda error: error,
    ) -> None:
        self._inner = inner
        self._after = after
        self._translate = translate
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def wait(self, timeout: Timeout | None = None) -> None:
        try:
            self._inner.wait(timeout)
        except Exception as error:
            raise_caused(self._translate(error), error)
        self._finish()

    def is_completed(self) -> bool:
        if not self._inner.is_completed():
            return False
        if self._inner.exception() is None:
            self._continue()
        return True

    def exception(self) -> BaseException | None:
        error = self._inner.exception()
        return self._error if error is None else self._translate(error)

    def get_future(self) -> torch.futures.Future[None]:
        ended = Completion(0.0)

        def settle(inner: torch.futures.Future[None]) -> None:
            error = raised_by(inner.value)
            ended.complete(self._continue() if error is None else self._translate(error))

        self._inner.get_future().add_done_callback(settle)
        return ended.get_future()

    def source_rank(self) -> int:
        return self._inner.source_rank()

    def cancel(self) -> bool:
        return self._inner.cancel()

    def _finish(self) -> None:
        """Call `after` unless it has been called, and raise its error."""
        error = self._continue()
        if error is not None:
            raise error

    def _continue(self) -> BaseException | None:
        """Call `after` unless it has been called, and return its error."""
        with self._lock:
            after = self._after
            self._after = None
            if after is not None:
                try:
                    after()
                except Exception as error:
                    # Store the error, because every later wait has to raise it again.
                    self._error = error
            return self._error


class ResultWork(ChainedWork, Generic[T]):
    """Work that has a result.

    Args:
        inner: The work.
        read: Function that returns the result once the work has succeeded.

    Example:
        >>> def program(comm):
        ...     return comm.all_gather_v(torch.arange(comm.rank), async_op=True).result()[1].tolist()
        >>> un.launch(program, nprocs=2, backend="thread")
        [[0], [0]]
    """

    def __init__(self, inner: Work, read: Callable[[], T]) -> None:
        super().__init__(inner)
        self._read = read

    def result(self, timeout: Timeout | None = None) -> T:
        """Return the result once the work is done; raise its error if it failed.

        Args:
            timeout: See `wait`.
        """
        self.wait(timeout)
        return self._read()


class WorkGroup(Work):
    """Several works as one, which completes when all works have completed, or fails with the first error.

    Args:
        works: The works, in the order in which `wait` waits for them.
        timeout_s: Default timeout of a `wait` for all works together; if None, each work's own default applies.
        poll_s: Seconds between polls of the later works while waiting for an earlier one, because some works progress
            only when polled; if None, only the work that is currently waited for is polled.
    """

    def __init__(self, works: Sequence[Work], timeout_s: float | None = None, poll_s: float | None = None) -> None:
        self._works = tuple(works)
        self._timeout_s = timeout_s
        self._poll_s = poll_s

    def wait(self, timeout: Timeout | None = None) -> None:
        limit = self._timeout_s if timeout is None else resolve_timeout(timeout)
        deadline = None if limit is None else clock.now() + limit
        for number, work in enumerate(self._works, 1):
            self._wait_for(work, self._works[number:], deadline)

    def _wait_for(self, work: Work, later: Sequence[Work], deadline: float | None) -> None:
        while True:
            left_s = None if deadline is None else seconds_left(deadline)
            polls = bool(later) and self._poll_s is not None and (left_s is None or left_s > self._poll_s)
            try:
                return work.wait(self._poll_s if polls else left_s)
            except CommTimeoutError:
                if not polls or work.exception() is not None:
                    raise
            for other in later:
                other.is_completed()

    def is_completed(self) -> bool:
        return self.exception() is not None or all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def get_future(self) -> torch.futures.Future[None]:
        ended = Completion(0.0)
        futures = [work.get_future() for work in self._works]
        pending = deque(futures)

        def settle(future: torch.futures.Future[None]) -> None:
            pending.pop()
            error = raised_by(future.value)
            if error is not None or not pending:
                ended.complete(error)

        for future in futures:
            future.add_done_callback(settle)
        if not futures:
            ended.complete()
        return ended.get_future()
