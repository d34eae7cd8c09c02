"""Collectives and blocking messages of shared memory by the native core: one call for each, whatever its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from unisono.collectives.native_calls import DTYPE_CODES, NativeCalls, Programs, known_dtypes
from unisono.core.call import Fingerprint
from unisono.core.tensors import as_flat, copy_back
from unisono.core.transport import Status
from unisono.core.types import MAX_TAG
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
        rank, size = barrier.rank, barrier.size
        core = module.Core(words, stages, rings, steps, stage_bytes, rank, size, oversubscribed, known_dtypes())
        super().__init__(core, rank, size, Programs(module, rank, size, *cost))
        self.rings = MessageRings(barrier, queues, core)
        self._barrier, self._mismatch = barrier, mismatch

    def mismatch(self, fingerprint: Fingerprint) -> NoReturn:
        """As of `FastPath`."""
        self._mismatch(fingerprint)

    def _cause(self) -> BaseException | None:
        return self._barrier.broken

    # -- messages ------------------------------------------------------------------------------------
    def takes(self, tensor: Any, peer: int, tag: int) -> bool:
        """As of `FastPath`: only while no other messages are in flight, which the rings move."""
        return (
            self.rings.idle
            and type(peer) is int
            and 0 <= peer < self._size
            and peer != self._rank
            and type(tag) is int
            and 0 <= tag <= MAX_TAG
            and isinstance(tensor, torch.Tensor)
        )

    def try_message(self, name: str, tensor: torch.Tensor, peer: int, tag: int, deadline: float) -> Status:
        """As of `FastPath`. A receive is refused if another message comes first."""
        rings, receives = self.rings, name == "recv"
        flat = as_flat(tensor, "tensor", written=receives)
        if flat is None or (receives and tag in rings.early[peer]):
            return Status.UNSUPPORTED
        move = self.core.receive if receives else self.core.send
        with rings.lock:
            rings.held = True
            try:
                status = move(peer, tag, DTYPE_CODES[flat.dtype], flat.data_ptr(), flat.numel(), deadline)
            finally:
                rings.held = False
        if receives and flat is not tensor and status == Status.OK:
            copy_back(tensor, flat)
        return self._ended(status)
