"""One collective of one size: how many elements go where, what must come out, and what it costs the links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from unisono.bench import pattern
from unisono.bench.pattern import Pattern
from unisono.types import ReduceOp

__all__ = ["COLLECTIVES", "REDUCING", "Problem", "Slot", "bus_factor"]

REDUCING = ("all_reduce", "reduce", "reduce_scatter")
_IN_PLACE = ("all_reduce", "broadcast", "reduce")
_WHOLE_SOURCE = ("reduce_scatter", "scatter", "all_to_all")
_WHOLE_TARGET = ("all_gather", "gather", "all_to_all")
COLLECTIVES = (*_IN_PLACE, "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "barrier")


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Memory for one call: what a rank gives, and where its result appears; the same tensor where it is in place."""

    source: torch.Tensor
    target: torch.Tensor


@dataclass(frozen=True)
class Problem:
    """What is measured, counted as nccl-tests count.

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
    def of_bytes(cls, collective: str, ranks: int, nbytes: int, dtype: torch.dtype, op: ReduceOp) -> Problem:
        """Of about so many bytes: rounded down to whole elements for every rank, and at least one each."""
        if collective == "barrier":
            return cls(collective, ranks, 0, dtype, op)
        parts = 1 if collective in _IN_PLACE else ranks
        return cls(collective, ranks, max(1, nbytes // dtype.itemsize // parts), dtype, op)

    @property
    def numel(self) -> int:
        """Elements of the larger of what a rank gives and what a rank gets."""
        return self.count * (1 if self.collective in _IN_PLACE else self.ranks)

    @property
    def nbytes(self) -> int:
        """Bytes of the larger of what a rank gives and what a rank gets; 0 for a barrier."""
        return self.numel * self.dtype.itemsize

    @property
    def bus_factor(self) -> float:
        """See the function of this name."""
        return bus_factor(self.collective, self.ranks)

    # -- memory --------------------------------------------------------------------------------
    @property
    def slot_numel(self) -> int:
        """Elements that one slot takes."""
        return self._source_numel if self.collective in _IN_PLACE else self._source_numel + self._target_numel

    @property
    def _source_numel(self) -> int:
        return self.count * (self.ranks if self.collective in _WHOLE_SOURCE else 1)

    @property
    def _target_numel(self) -> int:
        return self.count * (self.ranks if self.collective in _WHOLE_TARGET else 1)

    def slot(self, memory: torch.Tensor) -> Slot:
        """A slot in `slot_numel` elements of memory."""
        if self.collective in _IN_PLACE:
            return Slot(memory, memory)
        return Slot(memory[: self._source_numel], memory[self._source_numel :])

    # -- contents ------------------------------------------------------------------------------
    def fill(self, slot: Slot, rank: int) -> None:
        """Write what this rank gives; where the result will appear, write what it cannot be."""
        if slot.target is not slot.source:
            slot.target.zero_()
        self._given[rank].write(slot.source)

    def wrong(self, slot: Slot, rank: int) -> int:
        """How many elements of this rank's result are not what they must be."""
        return _WRONG[self.collective](self, slot.target, rank)

    @cached_property
    def _given(self) -> list[Pattern]:
        return [pattern.given(rank, self.ranks, self.dtype, self.op) for rank in range(self.ranks)]

    @cached_property
    def _reduced(self) -> Pattern:
        return pattern.reduced(self._given, self.op)

    def _wrong_parts(self, target: torch.Tensor, start: int) -> int:
        """Of a result that holds from each rank the elements from number `start` on."""
        parts = target.split(max(1, self.count))
        return sum(given.wrong(part, start) for given, part in zip(self._given, parts, strict=True))


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


_WRONG: dict[str, Callable[[Problem, torch.Tensor, int], int]] = {
    "all_reduce": lambda p, target, rank: p._reduced.wrong(target),
    "reduce": lambda p, target, rank: p._reduced.wrong(target) if rank == 0 else 0,
    "broadcast": lambda p, target, rank: p._given[0].wrong(target),
    "all_gather": lambda p, target, rank: p._wrong_parts(target, 0),
    "gather": lambda p, target, rank: p._wrong_parts(target, 0) if rank == 0 else 0,
    "reduce_scatter": lambda p, target, rank: p._reduced.wrong(target, rank * p.count),
    "scatter": lambda p, target, rank: p._given[0].wrong(target, rank * p.count),
    "all_to_all": lambda p, target, rank: p._wrong_parts(target, rank * p.count),
    "barrier": lambda p, target, rank: 0,
}
