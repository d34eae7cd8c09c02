"""A batch of messages in the rings of shared memory, as a work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from unisono.core.threads import DaemonThreadPool
from unisono.core.types import Message, Timeout
from unisono.core.work import CountdownWork, resolve_timeout, timeout_error
from unisono.errors import CommError, CommTimeoutError

__all__ = ["RingWork"]

_NO_TIMEOUT_S = 1e9

_Done = Callable[[], bool]
_Missing = Callable[[], Sequence[int]]
_Move = Callable[[float, _Done, _Missing], None]
_Check = Callable[[_Done, _Missing], None]

_threads = DaemonThreadPool("unisono shared memory")


class RingWork(CountdownWork):
    """A batch of messages in rings. The thread that waits for them or polls them moves them.

    Args:
        timeout_s: Default timeout in seconds.
        messages: The batch.
        move: Waits until messages have moved, or the work is done: `MessageRings.wait`.
        check: Moves messages without waiting: `MessageRings.check`.
    """

    def __init__(self, timeout_s: float, messages: Sequence[Message], move: _Move, check: _Check) -> None:
        self._move, self._check, self._is_waited_for = move, check, False
        super().__init__(timeout_s, messages)

    def wait(self, timeout: Timeout | None = None) -> None:
        if not self._done.is_set():
            started, limit = time.monotonic(), resolve_timeout(timeout, self.timeout_s)
            try:
                while not self._done.is_set():
                    self._move(started + limit, self._done.is_set, self._awaited)
            except CommTimeoutError:
                raise timeout_error(self._messages, time.monotonic() - started) from None
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        if not self._done.is_set():
            try:
                self._check(self._done.is_set, self._awaited)
            except CommError as error:
                self.complete(error)
        return self._done.is_set()

    def get_future(self) -> torch.futures.Future[None]:
        with self._lock:
            first, self._is_waited_for = not self._is_waited_for, True
        if first and not self._done.is_set():
            _threads.run(self._complete_in_background)
        return super().get_future()

    def _complete_in_background(self) -> None:
        try:
            self.wait(_NO_TIMEOUT_S)
        except CommError as error:
            # There is no caller to raise it in; the future reports it.
            self.complete(error)

    def _awaited(self) -> list[int]:
        return [message.peer for message in self._messages]
