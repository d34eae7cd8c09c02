"""Workload: one collective with one size, and its memory, data, expected results and bus bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from pathlib import Path

import torch

from unisono.core.collective import FAMILIES, Collective
from unisono.core.tensors import COMBINE
from unisono.core.types import ReduceOp

__all__ = [
    "COLLECTIVES",
    "PERIOD",
    "Pattern",
    "Slot",
    "SlotPool",
    "Workload",
    "bus_factor",
    "cache_bytes",
    "calls_per_sample",
    "given",
    "reduced",
]

COLLECTIVES = tuple(FAMILIES)


def bus_factor(collective: str, ranks: int) -> float:
    """Return the ratio of bus bandwidth to algorithm bandwidth, as defined by nccl-tests.

    Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md

    Example:
        >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("broadcast", 4)
        (1.5, 0.75, 1.0)
    """
    what = FAMILIES[collective]
    if not what.moves:
        return 0.0
    if what.in_place and what.root is not None:
        return 1.0
    return (2 if what.in_place else 1) * (ranks - 1) / ranks


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Memory for one call: a rank's input and output, which are the same tensor if the collective is in place."""

    source: torch.Tensor
    target: torch.Tensor


@dataclass(frozen=True)
class Workload:
    """A collective and its number of elements, which is counted as in nccl-tests.

    Attributes:
        collective: One of `COLLECTIVES`. Rooted collectives have root 0.
        ranks: Number of ranks.
        count: Number of elements in the whole tensor if the collective is in place, otherwise in one rank's part.
        dtype, op: Dtype of the elements, and the reduction.
    """

    collective: str
    ranks: int
    count: int
    dtype: torch.dtype = torch.float32
    op: ReduceOp = ReduceOp.SUM

    @classmethod
    def of_bytes(cls, collective: str, ranks: int, nbytes: int, dtype: torch.dtype, op: ReduceOp) -> Workload:
        """Return the workload of about `nbytes` bytes, rounded down to whole elements per rank, but at least one."""
        what = FAMILIES[collective]
        if not what.moves:
            return cls(collective, ranks, 0, dtype, op)
        parts = 1 if what.in_place else ranks
        return cls(collective, ranks, max(1, nbytes // dtype.itemsize // parts), dtype, op)

    @property
    def numel(self) -> int:
        """Number of elements of a rank's input or output, whichever is larger."""
        return self.count * (1 if self.what.in_place else self.ranks)

    @property
    def nbytes(self) -> int:
        """Size in bytes of a rank's input or output, whichever is larger; 0 for a barrier."""
        return self.numel * self.dtype.itemsize

    @property
    def what(self) -> Collective:
        """Description of the collective."""
        return FAMILIES[self.collective]

    # -- memory --------------------------------------------------------------------------------
    @property
    def slot_numel(self) -> int:
        """Number of elements in one slot."""
        if self.what.in_place:
            return self.count
        return self._source_numel + self.count * (self.ranks if self.what.gathers else 1)

    @property
    def _source_numel(self) -> int:
        return self.count * (self.ranks if self.what.scatters else 1)

    def slot(self, memory: torch.Tensor) -> Slot:
        """Return a slot made from `slot_numel` elements of memory."""
        if self.what.in_place:
            return Slot(memory, memory)
        return Slot(memory[: self._source_numel], memory[self._source_numel :])

    # -- contents ------------------------------------------------------------------------------
    def fill(self, slot: Slot, rank: int) -> None:
        """Write this rank's input. Fill the output with zeros, which don't occur in any result."""
        if slot.target is not slot.source:
            slot.target.zero_()
        self._given[rank].write(slot.source)

    def wrong(self, slot: Slot, rank: int) -> int:
        """Count the elements of this rank's result that differ from the expected elements."""
        sources = self.what.sources(rank, self.ranks, root=0)
        if not self.count or not sources:
            return 0
        if self.what.reduces:
            return self._reduced.wrong(slot.target, sources[0][1] * self.count)
        parts = slot.target.split(self.count)
        return sum(
            self._given[source].wrong(target, part * self.count)
            for (source, part), target in zip(sources, parts, strict=True)
        )

    @cached_property
    def _given(self) -> list[Pattern]:
        return [given(rank, self.ranks, self.dtype, self.op) for rank in range(self.ranks)]

    @cached_property
    def _reduced(self) -> Pattern:
        return reduced(self._given, self.op)


# -- data, which differs by rank and by index, so that every element of a result can be checked ----
PERIOD = 65521
"""Period of the data in elements. It is prime, so that a shift by any tile or share of a message is detected."""


class Pattern:
    """Infinite periodic sequence of values. Any range of the sequence can be written to a tensor or compared with one.

    Args:
        period: The first `PERIOD` values.
    """

    def __init__(self, period: torch.Tensor) -> None:
        self.period = period
        self._twice = torch.cat([period, period])

    def write(self, tensor: torch.Tensor, start: int = 0) -> None:
        """Fill a one-dimensional tensor with the values starting at index `start`."""
        for part, values in self._stretches(tensor, start):
            part.copy_(values)

    def wrong(self, tensor: torch.Tensor, start: int = 0) -> int:
        """Count the elements of a one-dimensional tensor that differ from the values starting at index `start`."""
        pairs = self._stretches(tensor, start)
        return sum(int((part != values).sum()) for part, values in pairs if not torch.equal(part, values))

    def _stretches(self, tensor: torch.Tensor, start: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pieces of at most one period, to avoid a copy as large as the message and to keep values in cache."""
        for low in range(0, tensor.numel(), PERIOD):
            part = tensor[low : low + PERIOD]
            offset = (start + low) % PERIOD
            yield part, self._twice[offset : offset + part.numel()]


def given(rank: int, ranks: int, dtype: torch.dtype, op: ReduceOp) -> Pattern:
    """Return a rank's input: non-zero integers, small enough that every dtype represents every result exactly."""
    # For AVG, use multiples of the number of ranks, so that averages are integers.
    scale = ranks if op is ReduceOp.AVG else 1
    if dtype is torch.bool:
        above = 2
    elif op is ReduceOp.PRODUCT:
        above = 3
    else:
        above = max(3, 127 // (ranks * scale))
    chance = torch.Generator().manual_seed(rank)
    low = 0 if dtype is torch.bool else 1
    return Pattern((torch.randint(low, above, (PERIOD,), generator=chance) * scale).to(dtype))


def reduced(patterns: list[Pattern], op: ReduceOp) -> Pattern:
    """Return the reduction of all ranks' inputs, computed in rank order."""
    total = reduce(COMBINE[op], [pattern.period for pattern in patterns])
    return Pattern(total / len(patterns) if op is ReduceOp.AVG else total)


# -- memory: the same slots each time for warm caches, or more slots than fit into the caches -------
_LINE_BYTES = 64
_PAGE_BYTES = 4096
_BATCH_BYTES = 256 << 10
_MOST_CALLS = 16
_USUAL_CACHE_BYTES = 32 << 20


def calls_per_sample(nbytes: int) -> int:
    """Return how many calls to time together: several, on different memory, if one call is too short to time."""
    return max(1, min(_MOST_CALLS, _BATCH_BYTES // max(1, nbytes)))


@cache
def cache_bytes() -> int:
    """Return the size in bytes of this machine's largest cache, or a typical size if the system does not report it."""
    paths = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    # Linux writes each size in KiB, as in "32768K".
    sizes = [path.read_text().strip().removesuffix("K") for path in paths]
    return max((int(size) << 10 for size in sizes if size.isdecimal()), default=0) or _USUAL_CACHE_BYTES


class SlotPool:
    """Pool of one rank's slots, which all have the same size.

    Args:
        workload: The workload that uses the slots.
        allocate: Function that allocates a one-dimensional tensor with the given number of elements; called once.
        cold: Whether to create enough slots that each has left the caches before it is used again.
    """

    def __init__(self, workload: Workload, allocate: Callable[[int], torch.Tensor], *, cold: bool) -> None:
        self._workload = workload
        self._batch = calls_per_sample(workload.nbytes)
        used = workload.slot_numel * workload.dtype.itemsize
        # Start cold slots on separate pages, because the hardware prefetches the line and page after the current one.
        # One extra cache line per slot prevents slots from mapping to the same cache set.
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
        """Return the slots for the next sample; for warm caches, these are the same tensors every time."""
        first = self._next
        self._next = (self._next + self._batch) % self.slots
        return self._slots[first : first + self._batch]

    def fill(self, rank: int) -> None:
        """Fill all slots as `Workload.fill` does."""
        for slot in self._slots:
            self._workload.fill(slot, rank)
