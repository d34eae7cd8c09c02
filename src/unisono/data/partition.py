"""A dataset cut into shuffled parts, one a rank, that lose no sample."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar, overload

import torch
from torch.utils.data import Dataset

__all__ = ["DataPartitioner", "Partition"]

T_co = TypeVar("T_co", covariant=True)


class _Indexable(Protocol[T_co]):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> T_co: ...


class Partition(Dataset[T_co]):
    """Some samples of a dataset, in an order of their own: a torch dataset, and a sequence.

    A slice gives a `Partition` of the same data. A negative index counts from the end.

    Args:
        data: Anything with a length that can be indexed. It is not copied.
        indices: Which samples of `data`, in which order.

    Attributes:
        data: As given.
        indices: A one-dimensional int64 tensor on the CPU.

    Raises:
        IndexError: On indexing past either end.

    Example:
        >>> part = Partition("abcdef", [5, 0, 2])
        >>> len(part), part[0], part[-1], list(part[1:])
        (3, 'f', 'c', ['a', 'c'])
    """

    def __init__(self, data: _Indexable[T_co], indices: Sequence[int] | torch.Tensor) -> None:
        self.data = data
        self.indices = torch.as_tensor(indices, dtype=torch.int64, device="cpu")

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> Partition[T_co]: ...
    def __getitem__(self, index: int | slice) -> T_co | Partition[T_co]:
        # Slices go through a range, since tensors refuse a negative step.
        if isinstance(index, slice):
            return Partition(self.data, self.indices[list(range(len(self))[index])])
        place = operator.index(index)
        if not -len(self) <= place < len(self):
            raise IndexError(f"this partition has {len(self)} samples, so there is none at {place}")
        return self.data[int(self.indices[place])]

    def __iter__(self) -> Iterator[T_co]:
        return (self.data[index] for index in self.indices.tolist())


class DataPartitioner(Generic[T_co]):
    """Puts every sample of a dataset into exactly one part, whatever the fractions.

    The same number of samples, `sizes` and `seed` give the same parts on every rank and platform.
    The global random generators are neither read nor changed. Costs 8 bytes and one sort key a sample.

    Args:
        data: Anything with a length that can be indexed. It is not copied.
        sizes: The fraction of each part; they sum to 1. Every part is less than one sample away from
            its fraction: what rounding down leaves goes where it cut off most, among equals to the first.
        seed: A whole number, 0 or more.

    Attributes:
        data: As given.
        partitions: For each part a one-dimensional int64 tensor of the samples' indices.

    Raises:
        ValueError: `sizes` do not sum to 1, or one is negative or no number; `seed` is negative.
        TypeError: `data` has no length, or `seed` is no whole number.

    Example:
        >>> partitioner = DataPartitioner(range(10, 20), sizes=[1 / 3, 1 / 3, 1 / 3])
        >>> parts = [partitioner.use(rank) for rank in range(3)]
        >>> [len(part) for part in parts]
        [4, 3, 3]
        >>> sorted(sample for part in parts for sample in part)
        [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
    """

    def __init__(self, data: _Indexable[T_co], sizes: Sequence[float] = (0.7, 0.2, 0.1), seed: int = 1234) -> None:
        try:
            count = len(data)
        except TypeError as error:
            raise TypeError(f"a {type(data).__name__} cannot be partitioned: give a dataset with a length") from error
        self.data = data
        self.partitions: tuple[torch.Tensor, ...] = _shuffled(count, seed).split(_lengths(count, sizes))

    def use(self, rank: int) -> Partition[T_co]:
        """The part of this rank. Raises `ValueError` if there is none."""
        if not 0 <= rank < len(self.partitions):
            raise ValueError(f"rank {rank} has no part: sizes name {len(self.partitions)}, for ranks from 0 on")
        return Partition(self.data, self.partitions[rank])


def _lengths(count: int, sizes: Sequence[float]) -> list[int]:
    """Whole numbers that sum to `count`, as near to the fractions as they can be (largest remainder)."""
    fractions = [float(size) for size in sizes]
    if not all(math.isfinite(fraction) and fraction >= 0 for fraction in fractions):
        raise ValueError(f"sizes must be fractions from 0 to 1, but are {fractions}")
    total = math.fsum(fractions)
    if not fractions or abs(total - 1) > 1e-9 * len(fractions):
        raise ValueError(f"sizes must sum to 1, but {fractions} sum to {total}; divide each of them by the sum")
    # Integers from here on, so that equal fractions are cut off equally. 0.7 means seven tenths.
    weights = [round(fraction * 10**15) for fraction in fractions]
    whole_weight = sum(weights)
    quotas = [divmod(count * weight, whole_weight) for weight in weights]
    lengths = [length for length, _ in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda part: quotas[part][1], reverse=True)
    for part in by_remainder[: count - sum(lengths)]:
        lengths[part] += 1
    return lengths


def _shuffled(count: int, seed: int) -> torch.Tensor:
    """The numbers below `count` in an order that depends on the seed alone.

    Of all generators' outputs only `Random.random` is promised to stay the same on every platform
    and in every version; hence a stable sort by such keys, not a library's shuffle.
    """
    if operator.index(seed) < 0:
        raise ValueError(f"seed must be 0 or more, but is {seed}")
    draw = random.Random(operator.index(seed)).random
    return torch.tensor([draw() for _ in range(count)], dtype=torch.float64, device="cpu").argsort(stable=True)
