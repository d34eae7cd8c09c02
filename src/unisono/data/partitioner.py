"""Base class of partitioners: the order of an epoch's samples, and their assignment to parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from unisono.core.registry import Registry
from unisono.data.feistel import IndexShuffle
from unisono.data.indices import Indices, Places, RangeIndices

__all__ = ["PARTITIONERS", "Bound", "Partitioner", "resolve"]


@dataclass(frozen=True)
class Bound:
    """Balance of the parts that a partitioner guarantees.

    Attributes:
        what: The quantity measured, such as "samples".
        load: Function that returns the quantity of some samples.
        least, most: Inclusive bounds of each part's load.
    """

    what: str
    load: Callable[[torch.Tensor], float]
    least: Sequence[float]
    most: Sequence[float]

    @classmethod
    def around(
        cls, what: str, load: Callable[[torch.Tensor], float], total: float, shares: Sequence[float], slack: float
    ) -> Bound:
        """Less than `slack` away from the share of the total (but for rounding of the shares)."""
        slack += 1e-6 + 1e-9 * total
        middle = [share * total for share in shares]
        return cls(what, load, [max(0.0, much - slack) for much in middle], [much + slack for much in middle])


class Partitioner(ABC):
    """Stateless assignment of an epoch's samples to parts: the same arguments give the same parts everywhere.

    Every sample belongs to exactly one part. `unisono.testing.partitioners` checks this, and the bounds that a
    partitioner states, for every partitioner with a name. A subclass implements `divide`, and overrides other
    methods where it differs.

    Attributes:
        shuffles: Whether an epoch is shuffled by default.
        interleaves: Whether equal parts take turns (part r of p has places r, r + p, r + 2p, ...), so that the
            samples used by all parts together are a prefix of the order. The global order then does not depend on
            the number of parts.
        in_step: Whether parts may be expected to be used at the same pace.
        draws: Whether the order is drawn by an object of each rank; `PartitionSampler` compares it between ranks.

    Example:
        >>> class Reversed(un.data.Partitioner):
        ...     shuffles = False
        ...     def divide(self, samples, shares, seed):
        ...         return un.data.contiguous().divide(samples, shares[::-1], seed)[::-1]
        >>> [list(part) for part in un.data.DataPartitioner(range(5), [0.6, 0.4], partition=Reversed())]
        [[2, 3, 4], [0, 1]]
    """

    shuffles: ClassVar[bool] = True
    interleaves: ClassVar[bool] = False
    in_step: bool = True
    draws: ClassVar[bool] = False

    @classmethod
    def of(cls, dataset: Any) -> Self:
        """Return a partitioner for a dataset, which supplies what the partitioner needs beyond a length.

        Args:
            dataset: Anything with a length. Its attribute `costs` or `lengths` is read for "balanced", `targets` or
                `labels` for "dirichlet" and "stratified", `groups` for "grouped"; of a `Subset`, that of its dataset.

        Raises:
            ValueError: The dataset has none of the attributes that are needed.

        Example:
            >>> un.data.PARTITIONERS["strided"].of(range(10)).fingerprint()
            'Strided'
        """
        return cls()

    def order(self, count: int, shuffle: bool, seed: int, epoch: int, shares: Sequence[float]) -> Indices:
        """Return the samples in the order of an epoch that begins with these parts.

        Args:
            count: Number of samples in the dataset.
            shuffle: Whether the order is drawn from `seed` and `epoch`; else it is the dataset's.
            seed, epoch: Whole numbers, 0 or more.
            shares: The fraction of each part; "contiguous" shuffles inside the parts only.

        Raises:
            ValueError: There are not as many labels, groups or costs as samples, or weights as parts; or `shuffle`
                is set for "sampled", whose sampler defines the order.

        Example:
            >>> list(un.data.strided().order(4, shuffle=False, seed=0, epoch=0, shares=[1.0]))
            [0, 1, 2, 3]
        """
        return IndexShuffle(count, seed, epoch) if shuffle else RangeIndices(count)

    @abstractmethod
    def divide(self, samples: Indices, shares: Sequence[float], seed: int) -> list[Places]:
        """Return the places of each part in `samples`, ascending.

        Args:
            samples: All of an epoch, or what is left of it.
            shares: The fraction of each part, as checked by `apportion`.
            seed: For random choices. Parts do not depend on the epoch, unless its order makes them.

        Raises:
            ValueError: A sample has no known label, group or cost, or the partitioner cannot make these shares.

        Example:
            >>> un.data.strided().divide(range(5), [0.5, 0.5], seed=0)
            [range(0, 5, 2), range(1, 5, 2)]
        """

    def bounds(self, samples: Indices, shares: Sequence[float]) -> list[Bound]:
        """Return the guaranteed bounds of the parts of `samples`; by default less than one sample from each share.

        Args:
            samples, shares: As in `divide`.

        Example:
            >>> bound = un.data.strided().bounds(range(5), [0.6, 0.4])[0]
            >>> bound.what, [round(load) for load in bound.least], [round(load) for load in bound.most]
            ('samples', [2, 1], [4, 3])
        """
        return [Bound.around("samples", len, len(samples), shares, 1)]

    def together(self, samples: torch.Tensor) -> torch.Tensor | None:
        """Return a number for each sample; samples of one number are never in two parts. None: no guarantee.

        Args:
            samples: Dataset indices: int64, one-dimensional, on the CPU.

        Example:
            >>> un.data.grouped(["ann", "bob", "ann"]).together(torch.tensor([0, 2]))
            tensor([0, 0])
        """
        return None

    def settings(self) -> dict[str, Any]:
        """Return the settings that may differ when a job resumes with another number of parts, as plain values.

        Example:
            >>> un.data.weighted([3, 1]).settings()
            {'weights': [3.0, 1.0]}
        """
        return {}

    def replaced(self, settings: dict[str, Any]) -> Partitioner:
        """Return this partitioner with the settings of an earlier phase.

        Args:
            settings: A result of `settings` of a partitioner of the same class.

        Example:
            >>> un.data.weighted([3, 1]).replaced({"weights": [1.0, 1.0]}).settings()
            {'weights': [1.0, 1.0]}
        """
        return self

    def fingerprint(self) -> str:
        """Return a digest that is equal for partitioners that deal alike, and otherwise different up to collisions.

        Example:
            >>> un.data.strided().fingerprint(), un.data.strided().fingerprint() == un.data.shuffled().fingerprint()
            ('Strided', False)
        """
        return type(self).__name__


PARTITIONERS: Registry[type[Partitioner]] = Registry("partitioner", "unisono.data.partitions", "PARTITIONER")
"""All partitioners: `PARTITIONERS["strided"]` is a class."""


def resolve(partition: str | Partitioner | type[Partitioner], dataset: Any) -> Partitioner:
    """The partitioner that is meant: one, a class, or a name.

    Example:
        >>> resolve("strided", range(10)).fingerprint()
        'Strided'
        >>> resolve("stride", range(10))
        Traceback (most recent call last):
        ...
        ValueError: unknown partitioner 'stride'; known: balanced, contiguous, ...
    """
    if isinstance(partition, str):
        return PARTITIONERS[partition].of(dataset)
    if isinstance(partition, type) and issubclass(partition, Partitioner):
        return partition.of(dataset)
    if not isinstance(partition, Partitioner):
        raise TypeError(f"a partitioner or one of {', '.join(PARTITIONERS.names())} is needed, not {partition!r}")
    return partition
