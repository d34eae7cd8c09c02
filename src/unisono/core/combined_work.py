"""Works made of other works: one continued by a call, and several as one."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from unisono.core.failure import raise_caused
from unisono.core.types import Timeout, Work
from unisono.core.work import Completion, resolve_timeout
from unisono.errors import CommTimeoutError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

__all__ = ["ChainedWork", "ResultWork", "WorkGroup"]


class ChainedWork(Work):
    """A work with a continuation for its good end, and a translation of its errors.

    Args:
        inner: The work that is continued.
        after: Called once `inner` has ended well, by the first thread that learns of it; its error becomes the work's.
        translate: Maps an error of `inner` to the error to raise.
    """

    def __init__(
        self,
        inner: Work,
        after: Callable[[], object] | None = None,
        translate: Callable[[BaseException], BaseException] = lambda error: error,
    ) -> None:
        self._inner, self._after, self._translate = inner, after, translate
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def wait(self, timeout: Timeout | None = None) -> None:
        try:
            self._inner.wait(timeout)
        except Exception as error:
            raise_caused(self._translate(error), error)
        error_after = self._continue()
        if error_after is not None:
            raise error_after

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
            try:
                inner.value()
            except Exception as error:
                ended.complete(self._translate(error))
            else:
                ended.complete(self._continue())

        self._inner.get_future().add_done_callback(settle)
        return ended.get_future()

    def cancel(self) -> bool:
        return self._inner.cancel()

    def _continue(self) -> BaseException | None:
        """Make the call unless it was made, and return its error."""
        with self._lock:
            after, self._after = self._after, None
            if after is not None:
                try:
                    after()
                except Exception as error:
                    # Every later wait has to raise it, too.
                    self._error = error
            return self._error


class ResultWork(ChainedWork, Generic[T]):
    """A work with a result.

    Args:
        inner: The work.
        read: Returns the result of the work once it has ended well.

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
        """Return the result when the work is done; raise its error.

        Args:
            timeout: As for `wait`.
        """
        self.wait(timeout)
        return self._read()


class WorkGroup(Work):
    """Several works as one: complete when all of them are, or with the first error.

    Args:
        works: The works, in the order in which `wait` waits for them.
        timeout_s: Limit of a `wait` without one, for all of them together; if None, each work's own limit.
        poll_s: Seconds between two looks at the later works while an earlier one is waited for, since some works
            advance only while they are looked at; if None, only the work that is waited for is looked at.
    """

    def __init__(self, works: Sequence[Work], timeout_s: float | None = None, poll_s: float | None = None) -> None:
        self._works, self._timeout_s, self._poll_s = tuple(works), timeout_s, poll_s

    def wait(self, timeout: Timeout | None = None) -> None:
        limit = self._timeout_s if timeout is None else resolve_timeout(timeout)
        deadline = None if limit is None else time.monotonic() + limit
        for number, work in enumerate(self._works, 1):
            self._wait_for(work, self._works[number:], deadline)

    def _wait_for(self, work: Work, later: Sequence[Work], deadline: float | None) -> None:
        while True:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
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
            try:
                future.value()
            except Exception as error:
                ended.complete(error)
            pending.pop()
            if not pending:
                ended.complete()

        for future in futures:
            future.add_done_callback(settle)
        if not futures:
            ended.complete()
        return ended.get_future()
