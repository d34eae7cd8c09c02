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
from unisono.transports.shm.segment import PAGE_BYTES, map_shared

__all__ = ["SymmetricMemory"]

_OFFSET_BITS = 44
_PIECE_BYTES = 256 << 10
"""Size of a block of each row: the reduced block is still in the cache when it is copied."""


def _mapped(descriptor: int, nbytes: int) -> torch.Tensor:
    """Map a file by torch: Python's mmap holds a descriptor while it lives, and a process has few of these."""
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8, device="cpu")


def _remove(memory: weakref.ref[SymmetricMemory], number: int) -> None:
    """Remove a segment after its last tensor. The tensor may outlive the group, and must not keep it alive."""
    found = memory()
    if found is not None:
        found._segments.pop(number, None)
        if found._core is not None:
            found._core.remove_segment(number)


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """Part of shared memory: a row of bytes for each rank."""

    number: int
    start: int
    stride: int
    rows: torch.Tensor


class SymmetricMemory:
    """The memory of one group that its ranks can reduce in place.

    Each call of `empty` creates its own anonymous file, with one equal slice per rank; tensors at the same offset of
    every slice are reduced together. It is unmapped when the last tensor in it is freed.

    Args:
        group, control, timeout_s: The ranks that share the memory, their control plane, and their time limit.
        core: The native core, which is notified of each segment.
    """

    def __init__(self, group: Group, control: ControlPlane, timeout_s: float, core: Any = None) -> None:
        self._group, self._control, self._timeout_s, self._core = group, control, timeout_s, core
        self._rank, self._size = group.rank, group.size
        self._segments: dict[int, _Segment] = {}
        self.allocations = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate zeroed memory on this rank. Collective: the same shape and dtype on every rank."""
        self.allocations += 1
        if self._core is not None:
            self._core.expect_symmetric_memory()
        count, rank, size = math.prod(shape), self._rank, self._size
        stride = max(1, -(-count * dtype.itemsize // PAGE_BYTES)) * PAGE_BYTES
        with torch.inference_mode(mode=False):
            name = f"segment {self.allocations}"
            memory = map_shared(self._group, self._control, name, stride * size, self._timeout_s, _mapped)
            rows = memory.view(size, stride)
            owner: Any = (ctypes.c_ubyte * stride).from_address(rows[rank].data_ptr())
            tensor = torch.frombuffer(owner, dtype=torch.uint8)
        owner.memory = memory
        self._segments[self.allocations] = _Segment(self.allocations, tensor.data_ptr(), stride, rows)
        if self._core is not None:
            self._core.add_segment(self.allocations, rows.data_ptr(), stride)
        # Only a tensor and its views keep their source alive.
        weakref.finalize(owner, partial(_remove, weakref.ref(self), self.allocations)).atexit = False
        return tensor[: count * dtype.itemsize].view(dtype).view(tuple(shape))

    def offset(self, tensor: torch.Tensor) -> int:
        """Return a number that is equal on all ranks for equal offsets in a segment; 0 for other memory."""
        start = tensor.data_ptr()
        for segment in list(self._segments.values()):
            if segment.start <= start and start + tensor.nbytes <= segment.start + segment.stride:
                return segment.number << _OFFSET_BITS | (start - segment.start + 1)
        return 0

    def reduce(self, offset: int, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Reduce this rank's share of the elements at an offset common to all ranks' tensors, into all of them."""
        segment, start = self._segments[offset >> _OFFSET_BITS], (offset & ((1 << _OFFSET_BITS) - 1)) - 1
        first, last = (r * tensor.numel() // self._size for r in (self._rank, self._rank + 1))
        step = max(1, _PIECE_BYTES // tensor.element_size())
        with torch.inference_mode(mode=False):
            table = segment.rows[:, start : start + tensor.nbytes].view(tensor.dtype)
        for low in range(first, last, step):
            block = table[:, low : min(low + step, last)]
            total = torch.empty_like(block[0])
            combine_all(op, block.unbind(0), total)
            if op is ReduceOp.AVG:
                divide(total, self._size)
            block.copy_(total)
