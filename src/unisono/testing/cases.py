"""One call of a collective, put down as a value: what every rank gives, and what it must then hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch

from unisono.testing.reference import Expected, moved, reduced
from unisono.types import ReduceOp

__all__ = ["CALLS", "IN_PLACE", "REDUCING", "ROOTED", "SCHEDULED_AS", "Case", "Row", "Tensors"]

SCHEDULED_AS = {
    "all_gather": "all_gather",
    "all_gather_single": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "gather": "gather",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "scatter": "scatter",
}
"""For each method of a communicator that a case can be about, the collective whose algorithms it takes."""

CALLS = tuple(SCHEDULED_AS)
IN_PLACE = frozenset({"all_reduce", "reduce", "broadcast"})
ROOTED = frozenset({"reduce", "broadcast", "gather", "scatter"})
REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single"})
_UNEVEN = frozenset({"all_gather", "reduce_scatter", "all_to_all", "all_to_all_single"})

Row = tuple[int, ...]
Tensors = list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """A call and all that makes a difference to it. Small: it travels to the ranks, who make the tensors.

    Attributes:
        call: The method, such as "all_reduce".
        size: How many ranks there are.
        count: Elements of one tensor (of the typical one, where lengths differ).
        dtype: Of all tensors.
        op: For calls that reduce.
        root: For calls that have one.
        layout: How tensors lie in memory; see `unisono.testing.placed`.
        algorithm: As passed to the call.
        async_op: As passed to the call.
        uneven: Whether lengths differ from rank to rank, where the call allows it. Some are zero.
        numbers: "whole" numbers, whose sums are exact, "any", or "nan" for some of these among them.
        seed: From which the elements are made.

    Example:
        >>> case = Case("all_gather", size=2, count=1, dtype=torch.int64, numbers="whole")
        >>> [[t.numel() for t in tensors] for tensors in case.given()]
        [[1], [1]]
    """

    call: str
    size: int
    count: int
    dtype: torch.dtype = torch.float32
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    layout: str = "contiguous"
    algorithm: str | None = None
    async_op: bool = False
    uneven: bool = False
    numbers: str = "whole"
    seed: int = 0

    def lengths(self) -> list[Row]:
        """Row s, column r: how many elements rank s has for rank r, where each pair has its own tensor."""
        if not (self.uneven and self.call in _UNEVEN):
            return [(self.count,) * self.size] * self.size
        generator = torch.Generator().manual_seed(self.seed)
        shares = [0, self.count // 2, self.count, self.count + 1]
        if self.call.startswith("all_to_all"):
            return [self._drawn(shares, generator) for _ in range(self.size)]
        return [self._drawn(shares, generator)] * self.size

    def _drawn(self, shares: list[int], generator: torch.Generator) -> Row:
        return tuple(shares[i] for i in torch.randint(len(shares), (self.size,), generator=generator).tolist())

    def given(self) -> list[Tensors]:
        """What each rank puts in; the same on every rank that asks. One-dimensional tensors."""
        generator = torch.Generator().manual_seed(self.seed)
        return [[_numbers(self, n, generator) for n in self._given_lengths(rank)] for rank in range(self.size)]

    def _given_lengths(self, rank: int) -> Row:
        row = self.lengths()[rank]
        match self.call:
            case "scatter":
                return row if rank == self.root else ()
            case "all_gather":
                return (row[rank],)
            case "reduce_scatter" | "all_to_all":
                return row
            case "reduce_scatter_single" | "all_to_all_single":
                return (sum(row),)
            case _:
                return (self.count,)

    def taken_lengths(self, rank: int) -> Row:
        """The lengths of what a rank gets, where that is not in place."""
        row, column = self.lengths()[rank], self._column(rank)
        match self.call:
            case "gather":
                return row if rank == self.root else ()
            case "all_gather":
                return row
            case "all_gather_single":
                return (sum(row),)
            case "all_to_all":
                return column
            case "all_to_all_single":
                return (sum(column),)
            case _:
                return (row[rank],)

    def _column(self, rank: int) -> Row:
        return tuple(row[rank] for row in self.lengths())

    def splits(self, rank: int) -> tuple[Row, Row]:
        """Of `all_to_all_single`: elements from each rank, and for each rank."""
        return self._column(rank), self.lengths()[rank]

    def expected(self, rank: int, given: list[Tensors]) -> list[Expected]:
        """What the tensors that a rank gets must hold, if `given` is what all ranks put in."""
        return _EXPECTED[self.call](self, rank, given)


def _numbers(case: Case, count: int, generator: torch.Generator) -> torch.Tensor:
    """Elements whose sum and product, over up to 16 ranks, stay in the range of the dtype."""
    dtype = case.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        info = None if dtype is torch.bool else torch.iinfo(dtype)
        low, high = (0, 1) if info is None else (info.min, info.max)
        # Over the whole range: sums and products wrap, and all ranks must wrap alike.
        words = torch.randint(max(low, -(2**62)), min(high, 2**62) + 1, (count,), generator=generator)
        return words.to(dtype)
    parts = 2 * count if dtype.is_complex else count
    if case.numbers == "whole":
        # Products stay small and exact, too.
        values = torch.randint(1, 3, (parts,), generator=generator) * 1.0
        values *= torch.randint(0, 2, (parts,), generator=generator) * 2 - 1
    else:
        values = torch.rand(parts, generator=generator, dtype=torch.float64) * 1.5 - 0.75
    if case.numbers == "nan":
        values[torch.rand(parts, generator=generator) < 0.2] = torch.nan
    if dtype.is_complex:
        return torch.view_as_complex(values.to(torch.float32).view(count, 2)).to(dtype)
    return values.to(dtype)


def _reduced(case: Case, rank: int, given: list[Tensors]) -> list[Expected]:
    return [reduced([tensors[0] for tensors in given], case.op)]


def _rooted_reduce(case: Case, rank: int, given: list[Tensors]) -> list[Expected]:
    return _reduced(case, rank, given) if rank == case.root else [moved(given[rank][0])]


def _reduced_part(case: Case, rank: int, given: list[Tensors]) -> list[Expected]:
    return [reduced([tensors[rank] for tensors in given], case.op)]


def _reduced_slice(case: Case, rank: int, given: list[Tensors]) -> list[Expected]:
    part = slice(rank * case.count, (rank + 1) * case.count)
    return [reduced([tensors[0][part] for tensors in given], case.op)]


def _gathered(case: Case, rank: int, given: list[Tensors]) -> list[Expected]:
    return [moved(tensors[0]) for tensors in given]


def _exchanged_slices(case: Case, rank: int, given: list[Tensors]) -> list[Expected]:
    parts = []
    for tensors, row in zip(given, case.lengths(), strict=True):
        edges = [0, *accumulate(row)]
        parts.append(tensors[0][edges[rank] : edges[rank + 1]])
    return [moved(torch.cat(parts))]


_EXPECTED: dict[str, Callable[[Case, int, list[Tensors]], list[Expected]]] = {
    "all_gather": _gathered,
    "all_gather_single": lambda case, rank, given: [moved(torch.cat([tensors[0] for tensors in given]))],
    "all_reduce": _reduced,
    "all_to_all": lambda case, rank, given: [moved(tensors[rank]) for tensors in given],
    "all_to_all_single": _exchanged_slices,
    "broadcast": lambda case, rank, given: [moved(given[case.root][0])],
    "gather": lambda case, rank, given: _gathered(case, rank, given) if rank == case.root else [],
    "reduce": _rooted_reduce,
    "reduce_scatter": _reduced_part,
    "reduce_scatter_single": _reduced_slice,
    "scatter": lambda case, rank, given: [moved(given[case.root][rank])],
}
