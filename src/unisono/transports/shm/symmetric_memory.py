"""Symmetric memory, allocated by `empty`: a slice of shared memory for each rank, reduced in place."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from unisono.core.control import ControlPlane
from unisono.core.group import Group
from unisono.transports.shm.segment import PAGE_BYTES, map_shared

__all__ = ["SymmetricMemory"]


def _mapped(descriptor: int, nbytes: int) -> torch.Tensor:
    """Map a file by torch: Python's mmap holds a descriptor while it lives, and a process has few of these."""
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8, device="cpu")


def _remove(memory: weakref.ref[SymmetricMemory], number: int) -> None:
    """Remove a segment after its last tensor. The tensor may outlive the group, and must not keep it alive."""
    found = memory()
    if found is not None:
        found._core.remove_segment(number)


class SymmetricMemory:
    """The memory of one group that its ranks can reduce in place.

    Each call of `empty` creates its own anonymous file, with one equal slice per rank; tensors at the same offset of
    every slice are reduced together. It is unmapped when the last tensor in it is freed.

    Args:
        group, control, timeout_s: The ranks that share the memory, their control plane, and their time limit.
        core: The native core, which reduces in place there.
    """

    def __init__(self, group: Group, control: ControlPlane, timeout_s: float, core: Any) -> None:
        self._group, self._control, self._timeout_s, self._core = group, control, timeout_s, core
        self._allocations = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate zeroed memory on this rank. Collective: the same shape and dtype on every rank."""
        self._allocations += 1
        self._core.expect_symmetric_memory()
        count, rank, size = math.prod(shape), self._group.rank, self._group.size
        stride = max(1, -(-count * dtype.itemsize // PAGE_BYTES)) * PAGE_BYTES
        with torch.inference_mode(mode=False):
            name = f"segment {self._allocations}"
            memory = map_shared(self._group, self._control, name, stride * size, self._timeout_s, _mapped)
            rows = memory.view(size, stride)
            owner: Any = (ctypes.c_ubyte * stride).from_address(rows[rank].data_ptr())
            tensor = torch.frombuffer(owner, dtype=torch.uint8)
        owner.memory = memory
        self._core.add_segment(self._allocations, rows.data_ptr(), stride)
        # Only a tensor and its views keep their source alive.
        weakref.finalize(owner, partial(_remove, weakref.ref(self), self._allocations)).atexit = False
        return tensor[: count * dtype.itemsize].view(dtype).view(tuple(shape))
