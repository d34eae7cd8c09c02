"""Tagged messages in shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from unisono.core import clock
from unisono.core.failure import left_error
from unisono.core.work import missing_ranks_error
from unisono.errors import CommError
from unisono.transports.tagged_messages import TaggedMessages

if TYPE_CHECKING:
    from unisono._native import Core

__all__ = ["ShmMessages"]

_SLICE_S = 0.02
"""Longest wait in the native core, after which failures and the deadline are checked."""


class ShmMessages(TaggedMessages):
    """Messages through byte rings, one per direction of each pair of ranks. Waiting threads move the bytes.

    Args:
        rank: This rank.
        core: The native core, which owns the rings and does the waiting.
    """

    def __init__(self, rank: int, core: Core) -> None:
        outgoing, incoming = core.rings()
        super().__init__(dict(enumerate(outgoing)), dict(enumerate(incoming)), rank)
        self._core = core

    def wake(self, peer: int) -> None:
        self._core.wake(peer)

    def wait(self, deadline: float, done: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        # Read `progress` before checking `done`, because another thread may move the messages that this thread waits
        # for, and increment `progress`.
        progress = self._core.progress
        started = clock.now()
        if done():
            return
        limit = min(deadline, started + _SLICE_S)
        self._core.wait_for_messages(list(self._sending), list(self._receiving), progress, limit)
        if not self.move() and not done():
            self.check(done, missing)
            if clock.now() > deadline:
                raise missing_ranks_error(clock.now() - started, missing())

    def end_of(self, peer: int) -> CommError | None:
        return left_error(peer) if self._core.has_left(peer) else None

    def abort(self, cause: BaseException) -> None:
        # Abort the core before `super().abort` takes the lock: a thread that is waiting in the core may hold that lock.
        self.broken: BaseException | None = cause
        self._core.abort()
        super().abort(cause)
