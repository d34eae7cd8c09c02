"""Blocking messages of shared memory by the native core: one call for each."""

from __future__ import annotations

from typing import Any

from unisono.tensors import is_plain
from unisono.transports._shm_marks import DTYPE_CODES
from unisono.transports._shm_native import OK, REFUSED, NativeCalls
from unisono.transports._shm_rings import Rings
from unisono.types import MAX_TAG

__all__ = ["NativeMessages"]


class NativeMessages:
    """Sends and receives of one rank, while no others are under way there: those are for `Rings` to see through.

    Args:
        calls: What holds the core, and tells its failures.
        rings: Where messages are.
    """

    def __init__(self, calls: NativeCalls, rings: Rings, rank: int, size: int) -> None:
        self._calls, self._rings, self._rank, self._size = calls, rings, rank, size

    def takes(self, tensor: Any, peer: int, tag: int) -> bool:
        """Whether a message needs no preparation, and nothing that was posted before it is to be seen through."""
        return (
            self._rings.idle
            and type(peer) is int
            and 0 <= peer < self._size
            and peer != self._rank
            and type(tag) is int
            and 0 <= tag <= MAX_TAG
            and is_plain(tensor)
        )

    def move(self, name: str, tensor: Any, peer: int, tag: int, deadline: float) -> bool:
        """Send or receive a tensor; False, with nothing done, if another message comes first."""
        rings, core, code = self._rings, self._calls.core, DTYPE_CODES[tensor.dtype]
        with rings.lock:
            rings.held = True
            try:
                if name == "send":
                    status = core.send(peer, tag, code, tensor.data_ptr(), tensor.numel(), deadline)
                elif tag not in rings.early[peer]:
                    status = core.receive(peer, tag, code, tensor.data_ptr(), tensor.numel(), deadline)
                else:
                    return False
            finally:
                rings.held = False
        if status not in (OK, REFUSED):
            self._calls.fail(status)
        return bool(status == OK)
