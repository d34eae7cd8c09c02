"""Memory for the calls: one place again and again where it is to be warm, always another where it is to be cold."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from unisono.bench.problem import Problem, Slot

__all__ = ["Pool", "cache_bytes", "calls_per_sample"]

_LINE_BYTES = 64
_PAGE_BYTES = 4096
_BATCH_BYTES = 256 << 10
_MOST_CALLS = 16
_USUAL_CACHE_BYTES = 32 << 20


def calls_per_sample(nbytes: int) -> int:
    """How many calls are timed together: several where one is too short for a clock, each on memory of its own."""
    return max(1, min(_MOST_CALLS, _BATCH_BYTES // max(1, nbytes)))


@cache
def cache_bytes() -> int:
    """Of the largest cache of this machine, or a usual size where the system does not tell."""
    found = [_parsed(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(found, default=0) or _USUAL_CACHE_BYTES


def _parsed(path: Path) -> int:
    text = path.read_text().strip()
    return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]] if text[:-1].isdigit() and text[-1] in "KM" else 0


class Pool:
    """Slots of one size for one rank.

    Args:
        problem: What they are for.
        allocate: Makes one-dimensional memory of so many elements; called once.
        cold: Whether there are so many slots that the one whose turn it is has left the caches.
    """

    def __init__(self, problem: Problem, allocate: Callable[[int], torch.Tensor], *, cold: bool) -> None:
        self._problem = problem
        self._batch = calls_per_sample(problem.nbytes)
        used = problem.slot_numel * problem.dtype.itemsize
        # In pages of their own where they are to be cold: the next line and the next page are fetched ahead. The one
        # line more keeps slots from meeting in the same set of a cache.
        stride = -(-max(used, _PAGE_BYTES if cold else 1) // _LINE_BYTES) * _LINE_BYTES + _LINE_BYTES
        slots = max(self._batch, 1 + -(-2 * cache_bytes() // stride) if cold else 0)
        slots = -(-slots // self._batch) * self._batch
        step = stride // problem.dtype.itemsize
        memory = allocate(slots * step)
        self._slots = [problem.slot(memory[at : at + problem.slot_numel]) for at in range(0, slots * step, step)]
        self._next = 0

    @property
    def slots(self) -> int:
        """How many there are."""
        return len(self._slots)

    def next(self) -> list[Slot]:
        """The slots for the next sample: the same tensors every time if there are no more."""
        first, self._next = self._next, (self._next + self._batch) % self.slots
        return self._slots[first : first + self._batch]

    def fill(self, rank: int) -> None:
        """Fill all slots as `Problem.fill` does."""
        for slot in self._slots:
            self._problem.fill(slot, rank)
