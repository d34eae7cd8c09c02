"""Workload: one collective of one size, with its memory, its data, its expected results and its bus bandwidth."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from unisono.core.collective import FAMILIES, Collective
from unisono.core.types import ReduceOp
from unisono.tools.bench import pattern
from unisono.tools.bench.pattern import Pattern

__all__ = ["COLLECTIVES", "Slot", "Workload", "bus_factor"]

COLLECTIVES = tuple(FAMILIES)


def bus_factor(collective: str, ranks: int) -> float:
    """Return bus over algorithm bandwidth as in nccl-tests: the load of the links, for any number of ranks.

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
    """Memory for one call: a rank's input and output; the same tensor if the collective is in place."""

    source: torch.Tensor
    target: torch.Tensor


@dataclass(frozen=True)
class Workload:
    """A collective on a number of elements, counted as nccl-tests count.

    Attributes:
        collective: One of `COLLECTIVES`. Rooted ones have root 0.
        ranks: Number of ranks.
        count: Elements of each rank's input or output: the whole tensor if in place, else one rank's part.
        dtype, op: Dtype of the elements, and their reduction.
    """

    collective: str
    ranks: int
    count: int
    dtype: torch.dtype = torch.float32
    op: ReduceOp = ReduceOp.SUM

    @classmethod
    def of_bytes(cls, collective: str, ranks: int, nbytes: int, dtype: torch.dtype, op: ReduceOp) -> Workload:
        """Return the workload of about `nbytes`: rounded down to whole elements for every rank, at least one."""
        what = FAMILIES[collective]
        if not what.moves:
            return cls(collective, ranks, 0, dtype, op)
        parts = 1 if what.in_place else ranks
        return cls(collective, ranks, max(1, nbytes // dtype.itemsize // parts), dtype, op)

    @property
    def numel(self) -> int:
        """Elements of a rank's input or output, whichever is larger."""
        return self.count * (1 if self.in_place else self.ranks)

    @property
    def nbytes(self) -> int:
        """Bytes of a rank's input or output, whichever is larger; 0 for a barrier."""
        return self.numel * self.dtype.itemsize

    @property
    def bus_factor(self) -> float:
        """See the function of this name."""
        return bus_factor(self.collective, self.ranks)

    @property
    def what(self) -> Collective:
        """The description of the collective."""
        return FAMILIES[self.collective]

    @property
    def in_place(self) -> bool:
        """Return whether the result replaces the input."""
        return self.what.in_place

    # -- memory --------------------------------------------------------------------------------
    @property
    def slot_numel(self) -> int:
        """Elements that one slot takes."""
        return self._source_numel if self.in_place else self._source_numel + self._target_numel

    @property
    def _source_numel(self) -> int:
        return self.count * (self.ranks if self.what.scatters else 1)

    @property
    def _target_numel(self) -> int:
        return self.count * (self.ranks if self.what.gathers else 1)

    def slot(self, memory: torch.Tensor) -> Slot:
        """Return a slot in `slot_numel` elements of memory."""
        if self.in_place:
            return Slot(memory, memory)
        return Slot(memory[: self._source_numel], memory[self._source_numel :])

    # -- contents ------------------------------------------------------------------------------
    def fill(self, slot: Slot, rank: int) -> None:
        """Write this rank's input, and zeros, which no result contains, to the output."""
        if slot.target is not slot.source:
            slot.target.zero_()
        self._given[rank].write(slot.source)

    def wrong(self, slot: Slot, rank: int) -> int:
        """Count the elements of this rank's result that are not the expected ones."""
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
        return [pattern.given(rank, self.ranks, self.dtype, self.op) for rank in range(self.ranks)]

    @cached_property
    def _reduced(self) -> Pattern:
        return pattern.reduced(self._given, self.op)
