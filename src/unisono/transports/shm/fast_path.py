"""Collectives and blocking messages of shared memory by the native core: one call for each, whatever its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from unisono.collectives.native_calls import NativeCalls, Programs, known_dtypes
from unisono.core.call import Fingerprint
from unisono.transports.shm.barrier import SharedBarrier
from unisono.transports.shm.p2p_ring import MessageRings

__all__ = ["ShmFastPath"]


class ShmFastPath(NativeCalls):
    """Native calls of one group in shared memory.

    Args:
        module: The native core.
        barrier: The counters that the core shares with Python.
        words, stages, rings, steps: Addresses of the counters, of two staging buffers per rank, of the rings of
            messages, and of those of algorithms' steps.
        stage_bytes: The length of a staging buffer.
        oversubscribed: Whether there are more ranks than processors: then a wait yields immediately.
        cost: Latency and seconds per byte of a message.
        queues: The memory of the rings.
        mismatch: Raises the error of ranks with different calls.
    """

    def __init__(
        self,
        module: Any,
        barrier: SharedBarrier,
        words: int,
        stages: int,
        rings: int,
        steps: int,
        stage_bytes: int,
        oversubscribed: bool,
        cost: tuple[float, float],
        queues: memoryview,
        mismatch: Callable[[Fingerprint], NoReturn],
    ) -> None:
        rank = barrier.rank
        size = barrier.size
        core = module.Core(words, stages, rings, steps, stage_bytes, rank, size, oversubscribed, known_dtypes())
        self.rings = MessageRings(barrier, queues, core)
        super().__init__(core, rank, size, Programs(module, rank, size, *cost), self.rings)
        self._barrier = barrier
        self._mismatch = mismatch

    def mismatch(self, fingerprint: Fingerprint) -> NoReturn:
        """As of `FastPath`."""
        self._mismatch(fingerprint)

    def _cause(self) -> BaseException | None:
        return self._barrier.broken
