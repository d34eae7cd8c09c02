"""Sequences of sample indices that are computed on access, so that they may have any length."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

__all__ = [
    "Concatenated",
    "Indices",
    "Listed",
    "Places",
    "RangeIndices",
    "Selected",
    "are_integers",
    "select",
    "taken_from",
]

Places = range | torch.Tensor
"""Positions in a sequence: a range with a positive step, or a one-dimensional int64 tensor on the CPU."""

_CHUNK = 4096


class Indices(ABC):
    """Ordered sample indices of an epoch, or of a part of an epoch. Behaves like a sequence of integers.

    Example:
        >>> half = un.data.IndexShuffle(10**12, seed=1)
        >>> len(half), half[7] == half.take(torch.tensor([7])).item()
        (1000000000000, True)
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, places: torch.Tensor) -> torch.Tensor:
        """Return the sample indices at these positions, as a one-dimensional int64 tensor on the CPU.

        Args:
            places: Positions in this sequence, from 0 to the length - 1. Positions are not checked.
        """

    def values(self, places: torch.Tensor) -> list[Any]:
        """Return a list of the samples at these positions, as objects that can index the dataset.

        Args:
            places: As in `take`.

        Example:
            >>> un.data.IndexShuffle(1).values(torch.tensor([0, 0]))
            [0, 0]
        """
        return self.take(places).tolist()

    def all(self) -> torch.Tensor:
        """Return all sample indices as one tensor. Memory: 8 bytes per sample.

        Example:
            >>> un.data.IndexShuffle(5).all().sort().values
            tensor([0, 1, 2, 3, 4])
        """
        return self.take(torch.arange(len(self), device="cpu"))

    def at(self, place: int) -> Any:
        """Return the dataset index at one position.

        Args:
            place: Position from 0 to the length - 1. Unlike with `[]`, the position is not checked.

        Example:
            >>> shuffle = un.data.IndexShuffle(5, seed=1)
            >>> shuffle.at(4) == shuffle[-1]
            True
        """
        return self.values(torch.tensor([place], device="cpu"))[0]

    def __getitem__(self, place: int) -> Any:
        number = operator.index(place)
        if not -len(self) <= number < len(self):
            raise IndexError(f"index {number} is out of range: there are {len(self)} samples")
        return self.at(number % len(self))

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), _CHUNK):
            yield from self.values(torch.arange(start, min(start + _CHUNK, len(self)), device="cpu"))


class RangeIndices(Indices):
    """The sequence 0, 1, 2, ..., `count` - 1."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def take(self, places: torch.Tensor) -> torch.Tensor:
        return places

    def at(self, place: int) -> int:
        return place


class Listed(Indices):
    """Stored output of a sampler: integers, or other objects that can index a dataset."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def take(self, places: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.values(places), dtype=torch.int64, device="cpu")

    def values(self, places: torch.Tensor) -> list[Any]:
        return [self._values[place] for place in places.tolist()]


class Selected(Indices):
    """Selection of positions in another sequence. Create selections with `select`, which flattens nested selections."""

    def __init__(self, base: Indices, places: Places) -> None:
        self.base = base
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    def take(self, places: torch.Tensor) -> torch.Tensor:
        return self.base.take(self._below(places))

    def values(self, places: torch.Tensor) -> list[Any]:
        return self.base.values(self._below(places))

    def at(self, place: int) -> Any:
        return self.base.at(int(self.places[place]))

    def _below(self, places: torch.Tensor) -> torch.Tensor:
        if isinstance(self.places, range):
            return places * self.places.step + self.places.start
        return self.places[places]


class Concatenated(Indices):
    """Concatenation of sequences, with a different offset added to the samples of each sequence."""

    def __init__(self, parts: Sequence[Indices], starts: Sequence[int] | None = None) -> None:
        self._parts = parts
        self._starts = [0] * len(parts) if starts is None else starts
        self._ends = [0, *accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self._ends[-1]

    def take(self, places: torch.Tensor) -> torch.Tensor:
        found = torch.empty_like(places)
        for part, start, first, end in zip(self._parts, self._starts, self._ends, self._ends[1:], strict=False):
            inside = (places >= first) & (places < end)
            found[inside] = part.take(places[inside] - first) + start
        return found

    def at(self, place: int) -> Any:
        number = bisect_right(self._ends, place) - 1
        value = self._parts[number].at(place - self._ends[number])
        start = self._starts[number]
        return value + start if start else value

    def values(self, places: torch.Tensor) -> list[Any]:
        if any(self._starts):
            return self.take(places).tolist()
        ends = torch.tensor(self._ends[1:], device="cpu")
        which = torch.searchsorted(ends, places, right=True).tolist()
        found: list[Any] = [None] * len(which)
        for number in set(which):
            inside = [i for i, part in enumerate(which) if part == number]
            below = places[torch.tensor(inside, device="cpu")] - self._ends[number]
            for i, value in zip(inside, self._parts[number].values(below), strict=True):
                found[i] = value
        return found


def select(base: Indices, pieces: Sequence[Places]) -> Indices:
    """Select and concatenate several pieces of `base`. A range of a range is stored as one range, to save memory.

    Example:
        >>> list(select(select(RangeIndices(100), [range(10, 50, 2)]), [range(3), range(10, 12)]))
        [10, 12, 14, 30, 32]
    """
    parts = [_selected(base, piece) for piece in pieces if len(piece)]
    return parts[0] if len(parts) == 1 else Concatenated(parts)


def _selected(base: Indices, piece: Places) -> Indices:
    if isinstance(base, Selected) and isinstance(base.places, range) and isinstance(piece, range):
        return Selected(base.base, base.places[piece.start : piece.stop : piece.step])
    return Selected(base, piece)


def are_integers(numbers: torch.Tensor) -> bool:
    """Return whether a tensor's dtype is an integer type; False for a boolean mask and for floating-point numbers."""
    return not (numbers.dtype == torch.bool or numbers.is_floating_point() or numbers.is_complex())


def taken_from(places: Places, start: int, stop: int) -> torch.Tensor:
    """Return `places[start:stop]` as a tensor."""
    piece = places[start:stop]
    if isinstance(piece, range):
        return torch.arange(piece.start, piece.stop, piece.step, device="cpu")
    return piece
