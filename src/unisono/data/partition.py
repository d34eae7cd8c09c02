"""Division of a dataset into shuffled parts, one per rank, without losing a sample."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar, overload

import torch
from torch.utils.data import Dataset

from unisono.data.feistel import seeded_permutation
from unisono.data.indices import are_integers, select
from unisono.data.partitioner import Partitioner, apportion, resolve

__all__ = ["DataPartitioner", "Partition"]

T_co = TypeVar("T_co", covariant=True)


class _Indexable(Protocol[T_co]):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> T_co: ...


class Partition(Dataset[T_co]):
    """Selection of a dataset's samples in any order, which is both a torch dataset and a sequence.

    Slicing returns another `Partition` of the same data. A negative index counts from the end.

    Args:
        data: Any object that can be indexed and has a length. The data is not copied.
        indices: Indices of the samples of `data`, in order.

    Attributes:
        data: As given.
        indices: A one-dimensional int64 tensor on the CPU.

    Raises:
        IndexError: Raised on access with an index that is out of range.
        TypeError: `indices` are not integers (for example, a boolean mask).
        ValueError: `indices` are not one-dimensional.

    Example:
        >>> part = Partition("abcdef", [5, 0, 2])
        >>> len(part), part[0], part[-1], list(part[1:])
        (3, 'f', 'c', ['a', 'c'])
    """

    def __init__(self, data: _Indexable[T_co], indices: Sequence[int] | torch.Tensor) -> None:
        self.data = data
        given = torch.as_tensor(indices, device="cpu")
        if given.numel() and not are_integers(given):
            raise TypeError(f"indices must be integers, not {given.dtype}; for a mask pass mask.nonzero().flatten()")
        if given.dim() != 1:
            raise ValueError(f"indices must be one-dimensional, but have the shape {tuple(given.shape)}")
        self.indices: torch.Tensor = given.long()

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> Partition[T_co]: ...
    def __getitem__(self, index: int | slice) -> T_co | Partition[T_co]:
        # Convert a slice to a list of positions, because tensors don't support negative steps.
        if isinstance(index, slice):
            return Partition(self.data, self.indices[list(range(len(self))[index])])
        position = operator.index(index)
        if not -len(self) <= position < len(self):
            raise IndexError(f"index {position} is out of range: this partition has {len(self)} samples")
        return self.data[int(self.indices[position])]

    def __iter__(self) -> Iterator[T_co]:
        return (self.data[index] for index in self.indices.tolist())


class DataPartitioner(Generic[T_co]):
    """Division of a dataset into parts of given sizes, in which every sample belongs to exactly one part.

    The same number of samples, `sizes` and `seed` give the same parts on every rank and platform. Global random
    generators are neither read nor changed. Memory: 8 bytes per sample. Time: a sort of all samples by a random key.

    Args:
        data: Any object that can be indexed and has a length. The data is not copied.
        sizes: The fraction of each part; fractions must sum to 1. Every part's length differs by less than 1 from its
            fraction times the number of samples. Lengths are first rounded down; each sample left over goes to one of
            the parts that lost most by rounding, and ties go to earlier parts.
        seed: An integer, 0 or more.
        partition: A partitioner or its name (see `un.data.PARTITIONERS`); its balance guarantee replaces the guarantee
            for `sizes`. If None, a random permutation, which is kept in memory.
        shuffle: Whether the order is shuffled; if None, the partitioner's default.

    Attributes:
        data: As given.
        partitions: For each part, a one-dimensional int64 tensor with the indices of its samples.

    Raises:
        ValueError: `sizes` do not sum to 1, or a size is negative or NaN; `seed` is negative; or the partitioner is
            unknown or does not fit the data.
        TypeError: `data` has no length, `seed` is not an integer, or `partition` is not a partitioner.

    Example:
        >>> partitioner = DataPartitioner(range(10, 20), sizes=[1 / 3, 1 / 3, 1 / 3])
        >>> parts = [partitioner.use(rank) for rank in range(3)]
        >>> [len(part) for part in parts]
        [4, 3, 3]
        >>> sorted(sample for part in parts for sample in part)
        [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
        >>> list(DataPartitioner(range(10, 20), [0.5, 0.5], partition="strided").use(1))
        [11, 13, 15, 17, 19]
    """

    def __init__(
        self,
        data: _Indexable[T_co],
        sizes: Sequence[float] = (0.7, 0.2, 0.1),
        seed: int = 1234,
        *,
        partition: str | Partitioner | type[Partitioner] | None = None,
        shuffle: bool | None = None,
    ) -> None:
        try:
            count = len(data)
        except TypeError as error:
            raise TypeError(f"a {type(data).__name__} cannot be partitioned: pass a dataset with a length") from error
        if operator.index(seed) < 0:
            raise ValueError(f"seed must be 0 or more, but is {seed}")
        self.data = data
        sizes = [float(size) for size in sizes]
        lengths = apportion(count, sizes)
        if partition is None and shuffle is not False:
            self.partitions: tuple[torch.Tensor, ...] = seeded_permutation(count, operator.index(seed)).split(lengths)
            return
        rule = resolve("contiguous" if partition is None else partition, data)
        order = rule.order(count, rule.shuffles if shuffle is None else shuffle, seed, 0, sizes)
        parts = (select(order, [positions]) for positions in rule.divide(order, sizes, seed))
        self.partitions = tuple(part.all() for part in parts)

    def __len__(self) -> int:
        return len(self.partitions)

    def __iter__(self) -> Iterator[Partition[T_co]]:
        return (self.use(rank) for rank in range(len(self)))

    def use(self, rank: int) -> Partition[T_co]:
        """Return the part that belongs to a rank.

        Args:
            rank: From 0 to the number of `sizes` - 1.

        Raises:
            ValueError: `rank` is out of range.
        """
        if not 0 <= rank < len(self.partitions):
            raise ValueError(f"rank {rank} has no part: sizes name {len(self.partitions)}, for ranks from 0 on")
        return Partition(self.data, self.partitions[rank])
