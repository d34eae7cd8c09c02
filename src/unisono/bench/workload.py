"""Workload: one collective of one size, with its memory, its data, its expected results and its bus bandwidth."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from unisono.bench import pattern
from unisono.bench.pattern import Pattern
from unisono.types import ReduceOp

__all__ = ["COLLECTIVES", "REDUCING", "Slot", "Workload", "bus_factor"]

# -- the collectives -----------------------------------------------------------------------------------
COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"),
    "barrier",
)
REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter"})
_IN_PLACE = frozenset({"all_reduce", "broadcast", "reduce"})
_FROM_ROOT = frozenset({"broadcast", "scatter"})
_TO_ROOT = frozenset({"reduce", "gather"})
# A rank gives, or gets, a part for each rank, and not only one.
_GIVES_PARTS = frozenset({"reduce_scatter", "scatter", "all_to_all"})
_GETS_PARTS = frozenset({"all_gather", "gather", "all_to_all"})


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests define it: what the links carry, whatever the ranks.

    Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md

    Example:
        >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("broadcast", 4)
        (1.5, 0.75, 1.0)
    """
    if collective == "barrier":
        return 0.0
    if collective in ("broadcast", "reduce"):
        return 1.0
    return (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks


# -- one of them ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Memory for one call: a rank's input, and the place of its result; the same tensor where that is in place."""

    source: torch.Tensor
    target: torch.Tensor


@dataclass(frozen=True)
class Workload:
    """A collective on a number of elements, counted as nccl-tests count.

    Attributes:
        collective: One of `COLLECTIVES`. Rooted ones have root 0.
        ranks: How many.
        count: Elements that each rank gives or gets: of the whole tensor where it is in place, else of one rank's part.
        dtype, op: Of the elements, and how they are reduced.
    """

    collective: str
    ranks: int
    count: int
    dtype: torch.dtype = torch.float32
    op: ReduceOp = ReduceOp.SUM

    @classmethod
    def of_bytes(cls, collective: str, ranks: int, nbytes: int, dtype: torch.dtype, op: ReduceOp) -> Workload:
        """Return the workload of about so many bytes: rounded down to whole elements for every rank, at least one."""
        if collective == "barrier":
            return cls(collective, ranks, 0, dtype, op)
        parts = 1 if collective in _IN_PLACE else ranks
        return cls(collective, ranks, max(1, nbytes // dtype.itemsize // parts), dtype, op)

    @property
    def numel(self) -> int:
        """Elements of the larger of what a rank gives and what a rank gets."""
        return self.count * (1 if self.in_place else self.ranks)

    @property
    def nbytes(self) -> int:
        """Bytes of the larger of what a rank gives and what a rank gets; 0 for a barrier."""
        return self.numel * self.dtype.itemsize

    @property
    def bus_factor(self) -> float:
        """See the function of this name."""
        return bus_factor(self.collective, self.ranks)

    @property
    def in_place(self) -> bool:
        """Whether the result replaces the input."""
        return self.collective in _IN_PLACE

    # -- memory --------------------------------------------------------------------------------
    @property
    def slot_numel(self) -> int:
        """Elements that one slot takes."""
        return self._source_numel if self.in_place else self._source_numel + self._target_numel

    @property
    def _source_numel(self) -> int:
        return self.count * (self.ranks if self.collective in _GIVES_PARTS else 1)

    @property
    def _target_numel(self) -> int:
        return self.count * (self.ranks if self.collective in _GETS_PARTS else 1)

    def slot(self, memory: torch.Tensor) -> Slot:
        """Return a slot in `slot_numel` elements of memory."""
        if self.in_place:
            return Slot(memory, memory)
        return Slot(memory[: self._source_numel], memory[self._source_numel :])

    # -- contents ------------------------------------------------------------------------------
    def fill(self, slot: Slot, rank: int) -> None:
        """Write this rank's input, and zeros, which no result has, where the result will appear."""
        if slot.target is not slot.source:
            slot.target.zero_()
        self._given[rank].write(slot.source)

    def wrong(self, slot: Slot, rank: int) -> int:
        """Count the elements of this rank's result that are not the expected ones."""
        if not self.count or (self.collective in _TO_ROOT and rank != 0):
            return 0
        start = rank * self.count if self.collective in _GIVES_PARTS else 0
        if self.collective in REDUCING:
            return self._reduced.wrong(slot.target, start)
        if self.collective in _FROM_ROOT:
            return self._given[0].wrong(slot.target, start)
        parts = slot.target.split(self.count)
        return sum(given.wrong(part, start) for given, part in zip(self._given, parts, strict=True))

    @cached_property
    def _given(self) -> list[Pattern]:
        return [pattern.given(rank, self.ranks, self.dtype, self.op) for rank in range(self.ranks)]

    @cached_property
    def _reduced(self) -> Pattern:
        return pattern.reduced(self._given, self.op)
