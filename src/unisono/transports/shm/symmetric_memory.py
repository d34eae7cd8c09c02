"""Symmetric memory, allocated by `empty`: a slice of shared memory for each rank, reduced in place."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from unisono.core.control import ControlPlane
from unisono.core.group import Group
from unisono.core.reduce_op import combine_all, divide
from unisono.core.types import ReduceOp
from unisono.transports.shm.segment import PAGE_BYTES, meet

__all__ = ["SymmetricMemory"]

_PLACE_BITS = 44
_PIECE_BYTES = 256 << 10
"""Size of a block of each row: the reduced block is still in the cache when it is copied."""


def _mapped(descriptor: int, nbytes: int) -> torch.Tensor:
    """Map a file by torch: Python's mmap holds a descriptor while it lives, and a process has few of these."""
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8, device="cpu")


def _drop(arenas: weakref.ref[SymmetricMemory], number: int) -> None:
    """Drop an arena after its last tensor. The tensor may outlive the group, and must not keep it alive."""
    found = arenas()
    if found is not None:
        found._arenas.pop(number, None)
        if found._core is not None:
            found._core.drop_arena(number)


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """One piece of shared memory: a row of bytes for each rank."""

    number: int
    start: int
    stride: int
    rows: torch.Tensor


class SymmetricMemory:
    """The memory of one group that its ranks can reduce in place.

    Each call of `empty` creates its own anonymous file, with one equal slice per rank, so the same
    offset in every rank's slice belongs together. It is unmapped when the last tensor on it dies.

    Args:
        group, control, timeout_s: The ranks that share the memory, their control plane, and their time limit.
        core: The native core, which is notified of it.
    """

    def __init__(self, group: Group, control: ControlPlane, timeout_s: float, core: Any = None) -> None:
        self._group, self._control, self._timeout_s, self._core = group, control, timeout_s, core
        self._rank, self._size = group.rank, group.size
        self._arenas: dict[int, _Segment] = {}
        self.made = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate zeroed memory on this rank. Collective: the same shape and dtype on every rank."""
        self.made += 1
        if self._core is not None:
            self._core.expect_arenas()
        count, rank, size = math.prod(shape), self._rank, self._size
        stride = max(1, -(-count * dtype.itemsize // PAGE_BYTES)) * PAGE_BYTES
        with torch.inference_mode(mode=False):
            name = f"arena {self.made}"
            memory = meet(self._group, self._control, name, stride * size, self._timeout_s, _mapped)
            rows = memory.view(size, stride)
            handed_out: Any = (ctypes.c_ubyte * stride).from_address(rows[rank].data_ptr())
            tensor = torch.frombuffer(handed_out, dtype=torch.uint8)
        handed_out.memory = memory
        self._arenas[self.made] = _Segment(self.made, tensor.data_ptr(), stride, rows)
        if self._core is not None:
            self._core.add_arena(self.made, rows.data_ptr(), stride)
        # Only a tensor and its views keep their source alive.
        weakref.finalize(handed_out, partial(_drop, weakref.ref(self), self.made)).atexit = False
        return tensor[: count * dtype.itemsize].view(dtype).view(tuple(shape))

    def place(self, tensor: torch.Tensor) -> int:
        """Return the place of a contiguous tensor: the same number on each rank for the same offset; 0 if elsewhere."""
        start = tensor.data_ptr()
        for arena in list(self._arenas.values()):
            if arena.start <= start and start + tensor.nbytes <= arena.start + arena.stride:
                return arena.number << _PLACE_BITS | (start - arena.start + 1)
        return 0

    def reduce(self, place: int, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Reduce this rank's share of the elements at a place common to all ranks' tensors, into all of them."""
        arena, offset = self._arenas[place >> _PLACE_BITS], (place & ((1 << _PLACE_BITS) - 1)) - 1
        first, last = (r * tensor.numel() // self._size for r in (self._rank, self._rank + 1))
        step = max(1, _PIECE_BYTES // tensor.element_size())
        with torch.inference_mode(mode=False):
            table = arena.rows[:, offset : offset + tensor.nbytes].view(tensor.dtype)
        for low in range(first, last, step):
            block = table[:, low : min(low + step, last)]
            total = torch.empty_like(block[0])
            combine_all(op, block.unbind(0), total)
            if op is ReduceOp.AVG:
                divide(total, self._size)
            block.copy_(total)
