"""A collective call described as a value, with every rank's input and the expected result."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from unisono.core.collective import COLLECTIVES, Collective
from unisono.core.types import ReduceOp
from unisono.testing.reference import Expected, permuted, reduced

__all__ = ["CALLS", "Case", "Row", "Tensors"]

CALLS = tuple(name for name, what in COLLECTIVES.items() if what.moves)
"""Methods of a communicator that a case can describe."""

Row = tuple[int, ...]
Tensors = list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """A collective call with all its parameters. Ranks receive the case, which is small, and create the tensors.

    Attributes:
        call: The method, such as "all_reduce".
        size: Number of ranks.
        count: Number of elements per tensor; if lengths differ, each is between 0 and `count` + 1.
        dtype: Dtype of all tensors.
        op: Reduction operation, for collectives that reduce.
        root: Root rank, for collectives that have a root.
        layout: Memory layout of the tensors; see `unisono.testing.memory_layouts`.
        algorithm: Name of the algorithm, or None for the default.
        async_op: Whether the call is asynchronous.
        uneven: Whether lengths differ between ranks, if the collective allows this; some lengths are then zero.
        numbers: "whole" for integer values (exact sums), "any", or "nan" to include some NaNs.
        seed: Seed for the elements.

    Example:
        >>> case = Case("all_gather", size=2, count=1, dtype=torch.int64, numbers="whole")
        >>> given = case.given()
        >>> [[t.numel() for t in tensors] for tensors in given]
        [[1], [1]]
        >>> case.taken_lengths(rank=0), [each.value.numel() for each in case.expected(0, given)]
        ((1, 1), [1, 1])
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

    @property
    def what(self) -> Collective:
        """The collective."""
        return COLLECTIVES[self.call]

    def lengths(self) -> list[Row]:
        """Return a matrix of lengths: row s, column r is the number of elements in rank s's tensor for rank r."""
        if not (self.uneven and self.what.uneven):
            return [(self.count,) * self.size] * self.size
        generator = torch.Generator().manual_seed(self.seed)
        shares = torch.tensor([0, self.count // 2, self.count, self.count + 1])
        rows = self.size if self.what.pairwise else 1
        drawn = shares[torch.randint(len(shares), (rows, self.size), generator=generator)]
        return [tuple(row) for row in drawn.expand(self.size, self.size).tolist()]

    def given(self) -> list[Tensors]:
        """Return all ranks' inputs as one-dimensional tensors, with the same values on every rank."""
        generator = torch.Generator().manual_seed(self.seed)
        return [[_numbers(self, n, generator) for n in self._given_lengths(rank)] for rank in range(self.size)]

    def _given_lengths(self, rank: int) -> Row:
        what = self.what
        row = self.lengths()[rank]
        if what.in_place:
            return (self.count,)
        if not what.contributes(rank, self.root):
            return ()
        return self._laid_out(row) if what.scatters else (row[rank],)

    def taken_lengths(self, rank: int) -> Row:
        """Return the lengths of the tensors that a rank receives, for collectives that are not in place.

        Args:
            rank: The receiving rank.
        """
        what = self.what
        row = self.lengths()[rank]
        if not what.receives(rank, self.root):
            return ()
        if not what.gathers:
            return (row[rank],)
        return self._laid_out(self._column(rank) if what.pairwise else row)

    def _laid_out(self, lengths: Row) -> Row:
        return (sum(lengths),) if self.what.packed else lengths

    def _column(self, rank: int) -> Row:
        return tuple(row[rank] for row in self.lengths())

    def splits(self, rank: int) -> dict[str, Row]:
        """Return the split sizes as keyword arguments, for a collective that takes them; empty for other calls.

        Args:
            rank: The calling rank.

        Example:
            >>> Case("all_to_all_single", size=2, count=3).splits(rank=0)
            {'output_split_sizes': (3, 3), 'input_split_sizes': (3, 3)}
        """
        if not (self.what.packed and self.what.uneven):
            return {}
        return {"output_split_sizes": self._column(rank), "input_split_sizes": self.lengths()[rank]}

    def expected(self, rank: int, given: list[Tensors]) -> list[Expected]:
        """Return the expected contents of a rank's output tensors, or of its tensor for an in-place call.

        Args:
            rank: The rank.
            given: The inputs of all ranks, as `given()` returns them.
        """
        what = self.what
        if what.in_place and not what.receives(rank, self.root):
            return [permuted(given[rank][0])]
        sources = what.sources(rank, self.size, self.root)
        parts = [self._part(given[source], source, part) for source, part in sources]
        if what.reduces:
            return [reduced(parts, self.op)]
        return [permuted(torch.cat(parts))] if what.packed else [permuted(part) for part in parts]

    def _part(self, given: Tensors, source: int, part: int) -> torch.Tensor:
        if not (self.what.packed and self.what.scatters):
            return given[part]
        edges = [0, *accumulate(self.lengths()[source])]
        return given[0][edges[part] : edges[part + 1]]


def _numbers(case: Case, count: int, generator: torch.Generator) -> torch.Tensor:
    """Return elements; unless they are integers, sums and products over up to 16 ranks stay in the dtype's range."""
    dtype = case.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        info = None if dtype is torch.bool else torch.iinfo(dtype)
        low, high = (0, 1) if info is None else (info.min, info.max)
        # Cover the whole range: even if sums and products wrap around, they must be equal on all ranks.
        words = torch.randint(max(low, -(2**62)), min(high, 2**62) + 1, (count,), generator=generator)
        return words.to(dtype)
    parts = 2 * count if dtype.is_complex else count
    if case.numbers == "whole":
        # Use only 1 and 2 and their negatives, so that products also stay small and exact.
        values = torch.randint(1, 3, (parts,), generator=generator) * 1.0
        values *= torch.randint(0, 2, (parts,), generator=generator) * 2 - 1
    else:
        values = torch.rand(parts, generator=generator, dtype=torch.float64) * 1.5 - 0.75
    if case.numbers == "nan":
        values[torch.rand(parts, generator=generator) < 0.2] = torch.nan
    if dtype.is_complex:
        return torch.view_as_complex(values.to(torch.float32).view(count, 2)).to(dtype)
    return values.to(dtype)
