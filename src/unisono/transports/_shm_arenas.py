"""Memory that `empty` hands out: a slice of shared memory for each rank, reduced where it lies."""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Sequence

import torch

from unisono.control import Control
from unisono.group import Group
from unisono.transports._shm_memory import PAGE_BYTES, meet

__all__ = ["Arenas"]

_PLACE_BITS = 44


class _Arena:
    """One piece of shared memory; known here only as long as a tensor of this rank lives in it."""

    def __init__(self, number: int, memory: mmap.mmap, stride: int, start: int) -> None:
        self.number, self.stride, self.start = number, stride, start
        self.memory = weakref.ref(memory)


class Arenas:
    """The memory of one group that its ranks can reduce in place.

    Each call of `empty` is an anonymous file of its own, with one equal slice a rank, so the same
    offset in every rank's slice belongs together. It is unmapped when the last tensor on it dies.
    """

    def __init__(self, group: Group, control: Control, timeout_s: float) -> None:
        self._group, self._control, self._timeout_s = group, control, timeout_s
        self._arenas: list[_Arena] = []
        self._made = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory of this rank. Collective: the same shape and dtype on every rank."""
        self._made += 1
        count = math.prod(shape)
        stride = max(1, -(-count * dtype.itemsize // PAGE_BYTES)) * PAGE_BYTES
        memory = meet(self._group, self._control, f"arena {self._made}", stride * self._group.size, self._timeout_s)
        tensor = torch.frombuffer(memory, dtype=torch.uint8, count=stride, offset=stride * self._group.rank)
        self._arenas = [arena for arena in self._arenas if arena.memory() is not None]
        self._arenas.append(_Arena(self._made, memory, stride, tensor.data_ptr()))
        return tensor[: count * dtype.itemsize].view(dtype).view(tuple(shape))

    def place(self, tensor: torch.Tensor) -> int:
        """Where a contiguous tensor lies, the same number on each rank for the same offset; 0 if elsewhere."""
        start = tensor.data_ptr()
        for arena in self._arenas:
            if arena.start <= start and start + tensor.nbytes <= arena.start + arena.stride and arena.memory():
                return arena.number << _PLACE_BITS | (start - arena.start + 1)
        return 0

    def table(self, place: int, tensor: torch.Tensor) -> torch.Tensor:
        """Each rank's elements at the place where this rank's tensor lies: a row a rank."""
        number, offset = place >> _PLACE_BITS, (place & ((1 << _PLACE_BITS) - 1)) - 1
        arena = next(a for a in self._arenas if a.number == number)
        memory = arena.memory()
        assert memory is not None
        rows = torch.frombuffer(memory, dtype=torch.uint8).view(self._group.size, arena.stride)
        return rows[:, offset : offset + tensor.nbytes].view(tensor.dtype)
