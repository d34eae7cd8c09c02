"""Memory for the calls: the same each time for warm caches, rotating through more than the caches for cold ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from unisono.tools.bench.workload import Slot, Workload

__all__ = ["SlotPool", "cache_bytes", "calls_per_sample"]

_LINE_BYTES = 64
_PAGE_BYTES = 4096
_BATCH_BYTES = 256 << 10
_MOST_CALLS = 16
_USUAL_CACHE_BYTES = 32 << 20


def calls_per_sample(nbytes: int) -> int:
    """Return how many calls are timed together: several where one is too short for a clock, each on its own memory."""
    return max(1, min(_MOST_CALLS, _BATCH_BYTES // max(1, nbytes)))


@cache
def cache_bytes() -> int:
    """Return the size of the largest cache of this machine, or a usual size where the system does not report it."""
    found = [_parsed(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(found, default=0) or _USUAL_CACHE_BYTES


def _parsed(path: Path) -> int:
    text = path.read_text().strip()
    return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]] if text[:-1].isdigit() and text[-1] in "KM" else 0


class SlotPool:
    """Slots of one size for one rank.

    Args:
        workload: The workload that uses them.
        allocate: Allocates one-dimensional memory of a number of elements; called once.
        cold: Whether there are enough slots for each to leave the caches before its next use.
    """

    def __init__(self, workload: Workload, allocate: Callable[[int], torch.Tensor], *, cold: bool) -> None:
        self._workload = workload
        self._batch = calls_per_sample(workload.nbytes)
        used = workload.slot_numel * workload.dtype.itemsize
        # Cold slots start on separate pages, because the hardware prefetches the next line and page. The extra line
        # keeps slots from mapping to the same cache set.
        stride = -(-max(used, _PAGE_BYTES if cold else 1) // _LINE_BYTES) * _LINE_BYTES + _LINE_BYTES
        slots = max(self._batch, 1 + -(-2 * cache_bytes() // stride) if cold else 0)
        slots = -(-slots // self._batch) * self._batch
        step = stride // workload.dtype.itemsize
        memory = allocate(slots * step)
        self._slots = [workload.slot(memory[at : at + workload.slot_numel]) for at in range(0, slots * step, step)]
        self._next = 0

    @property
    def slots(self) -> int:
        """Number of slots."""
        return len(self._slots)

    def next(self) -> list[Slot]:
        """Return the slots for the next sample: the same tensors every time if there are no more."""
        first = self._next
        self._next = (self._next + self._batch) % self.slots
        return self._slots[first : first + self._batch]

    def fill(self, rank: int) -> None:
        """Fill all slots as `Workload.fill` does."""
        for slot in self._slots:
            self._workload.fill(slot, rank)
