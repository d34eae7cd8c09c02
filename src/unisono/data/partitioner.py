"""Base classes of partitioners, which order an epoch's samples and assign them to parts, one per rank."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from unisono.core.registry import Registry
from unisono.data.feistel import IndexShuffle
from unisono.data.indices import Indices, Places, RangeIndices

__all__ = [
    "PARTITIONERS",
    "AssignmentPartitioner",
    "Bound",
    "Partitioner",
    "apportion",
    "equal_shares",
    "fractions_of",
    "pieces_of",
    "resolve",
]


@dataclass(frozen=True)
class Bound:
    """Bounds that a partitioner guarantees for a quantity in each part.

    Attributes:
        what: The quantity measured, such as "samples".
        load: Function that returns the quantity for a tensor of samples.
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
        """Return a bound that lets a part's load differ from its share of `total` by up to `slack`, plus rounding."""
        slack += 1e-6 + 1e-9 * total
        middle = [share * total for share in shares]
        return cls(what, load, [max(0.0, much - slack) for much in middle], [much + slack for much in middle])


class Partitioner(ABC):
    """Stateless assignment of an epoch's samples to parts: the same arguments give the same parts on every rank.

    Every sample belongs to exactly one part: `unisono.testing.partitioners` checks this, and the stated bounds, for
    every named partitioner. A subclass implements `divide`, and overrides other methods if their defaults don't fit.

    Attributes:
        shuffles: Whether an epoch is shuffled by default.
        interleaves: Whether equal parts are interleaved: part r of p has positions r, r + p, r + 2p and so on. If all
            parts have used the same number of samples, these samples together are a prefix of the epoch's order, and
            this order does not depend on the number of parts.
        in_step: Whether ranks can be expected to progress through their parts at the same pace.
        draws: Whether each rank itself draws the order from a random generator, so that `PartitionSampler` has to
            compare the order between ranks.

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
        """Return a partitioner for a dataset, using the dataset attributes that the partitioner needs.

        Args:
            dataset: Anything with a length. "balanced" reads the dataset's attribute `costs` or `lengths`, "dirichlet"
                and "stratified" read `targets` or `labels`, and "grouped" reads `groups`. For a `Subset`, the
                attributes of the underlying dataset are used.

        Raises:
            ValueError: The dataset does not have the attribute.

        Example:
            >>> un.data.PARTITIONERS["strided"].of(range(10)).fingerprint()
            'Strided'
        """
        return cls()

    def order(self, count: int, shuffle: bool, seed: int, epoch: int, shares: Sequence[float]) -> Indices:
        """Return all samples in the epoch's order. `shares` are the parts' shares at the start of the epoch.

        Args:
            count: Number of samples in the dataset.
            shuffle: Whether to shuffle with `seed` and `epoch`; otherwise, samples stay in the dataset's order.
            seed, epoch: Integers, 0 or more.
            shares: The fraction of each part; "contiguous" needs it, because it shuffles only within parts.

        Raises:
            ValueError: The number of labels, groups or costs differs from the number of samples; the number of weights
                differs from the number of parts; or `shuffle` is set for "sampled", which takes its order from a
                sampler.

        Example:
            >>> list(un.data.strided().order(4, shuffle=False, seed=0, epoch=0, shares=[1.0]))
            [0, 1, 2, 3]
        """
        return IndexShuffle(count, seed, epoch) if shuffle else RangeIndices(count)

    @abstractmethod
    def divide(self, samples: Indices, shares: Sequence[float], seed: int) -> list[Places]:
        """Return each part's positions in `samples`, in ascending order.

        Args:
            samples: All samples of an epoch, or the samples that remain after resuming.
            shares: The fraction of each part, as checked by `apportion`.
            seed: Seed of random choices, the same in every epoch: epochs differ only in the order of samples.

        Raises:
            ValueError: A sample has no known label, group or cost, or the partitioner does not support `shares`.

        Example:
            >>> un.data.strided().divide(range(5), [0.5, 0.5], seed=0)
            [range(0, 5, 2), range(1, 5, 2)]
        """

    def bounds(self, samples: Indices, shares: Sequence[float]) -> list[Bound]:
        """Return guaranteed bounds for the parts of `samples`; by default, each part's size is within 1 of its share.

        Args:
            samples, shares: As in `divide`.

        Example:
            >>> bound = un.data.strided().bounds(range(5), [0.6, 0.4])[0]
            >>> bound.what, [round(load) for load in bound.least], [round(load) for load in bound.most]
            ('samples', [2, 1], [4, 3])
        """
        return [Bound.around("samples", len, len(samples), shares, 1)]

    def together(self, samples: torch.Tensor) -> torch.Tensor | None:
        """Return a number for each sample; samples with the same number are always in the same part.

        None means that the partitioner does not keep any samples together.

        Args:
            samples: Dataset indices: int64, one-dimensional, on the CPU.

        Example:
            >>> un.data.grouped(["ann", "bob", "ann"]).together(torch.tensor([0, 2]))
            tensor([0, 0])
        """
        return None

    def settings(self) -> dict[str, Any]:
        """Return plain values: the settings that may change when a job resumes with a different number of parts.

        Example:
            >>> un.data.weighted([3, 1]).settings()
            {'weights': [3.0, 1.0]}
        """
        return {}

    def replaced(self, settings: dict[str, Any]) -> Partitioner:
        """Return a copy of this partitioner with the settings of an earlier phase of the epoch.

        Args:
            settings: Result of `settings` from a partitioner of the same class.

        Example:
            >>> un.data.weighted([3, 1]).replaced({"weights": [1.0, 1.0]}).settings()
            {'weights': [1.0, 1.0]}
        """
        return self

    def fingerprint(self) -> str:
        """Return a digest that is equal for two partitioners only if they assign samples in the same way.

        Example:
            >>> un.data.strided().fingerprint(), un.data.strided().fingerprint() == un.data.shuffled().fingerprint()
            ('Strided', False)
        """
        return type(self).__name__


PARTITIONERS: Registry[type[Partitioner]] = Registry("partitioner", "unisono.data.partitions", "PARTITIONER")
"""Registry of all partitioner classes by name, such as `PARTITIONERS["strided"]`."""


def resolve(partition: str | Partitioner | type[Partitioner], dataset: Any) -> Partitioner:
    """Return the partitioner for `partition`, which is an instance, a class or a name.

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


def equal_shares(parts: int) -> list[float]:
    """Return a list of equal shares that sum to 1."""
    return [1 / parts] * parts


def fractions_of(weights: Sequence[float], name: str = "weights") -> list[float]:
    """Return weights divided by their sum. Raises `ValueError` if a weight is negative or NaN, or all are zero."""
    given = [float(weight) for weight in weights]
    if not all(math.isfinite(weight) and weight >= 0 for weight in given) or not math.fsum(given) > 0:
        raise ValueError(f"{name} must be finite numbers, 0 or more, and not all 0, but are {given}")
    total = math.fsum(given)
    return [weight / total for weight in given]


def apportion(count: int, sizes: Sequence[float]) -> list[int]:
    """Return integers that sum to `count`; each differs by less than 1 from its fraction times `count`.

    The method is Hamilton's (largest remainder): numbers are first rounded down, and the units left over go to the
    fractions that lost most by rounding; ties go to earlier fractions. `apportion` can also choose batch sizes for
    ranks that run at different speeds.

    Args:
        count: The total, such as a number of samples; 0 or more.
        sizes: Fractions from 0 to 1, which must sum to 1, with a tolerance of 1e-9 per fraction.

    Raises:
        ValueError: `sizes` do not sum to 1, or a size is negative or NaN.

    Example:
        >>> un.data.apportion(64, [0.5, 0.25, 0.25]), un.data.apportion(10, [1 / 3] * 3)
        ([32, 16, 16], [4, 3, 3])
    """
    fractions = [float(size) for size in sizes]
    if not all(math.isfinite(fraction) and fraction >= 0 for fraction in fractions):
        raise ValueError(f"sizes must be fractions from 0 to 1, but are {fractions}")
    total = math.fsum(fractions)
    if not fractions or abs(total - 1) > 1e-9 * len(fractions):
        raise ValueError(f"sizes must sum to 1, but {fractions} sum to {total:.12g}; divide each of them by the sum")
    # Compute with integers from here on, so that 0.7 means exactly seven tenths, and equal fractions have equal
    # remainders.
    weights = [round(fraction * 10**15) for fraction in fractions]
    total_weight = sum(weights)
    quotas = [divmod(count * weight, total_weight) for weight in weights]
    lengths = [length for length, _ in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda part: quotas[part][1], reverse=True)
    for part in by_remainder[: count - sum(lengths)]:
        lengths[part] += 1
    return lengths


class AssignmentPartitioner(Partitioner):
    """Base class of partitioners that assign samples by their content rather than by their position in the order.

    Each part contains the same samples in every epoch, in a different order. Memory: about 50 bytes per sample on every
    rank while dividing, and 8 bytes afterwards.

    Args:
        known: One value for each sample of the dataset; one-dimensional, on the CPU.
        name: Name of these values in error messages.
    """

    def __init__(self, known: torch.Tensor, name: str) -> None:
        self._known = known
        self._name = name

    @abstractmethod
    def assign(self, samples: torch.Tensor, shares: Sequence[float], seed: int) -> torch.Tensor:
        """Return the part number of each sample, as a one-dimensional int64 tensor.

        Args:
            samples: Dataset indices, ascending: int64, one-dimensional, on the CPU.
            shares, seed: As in `divide`.

        Raises:
            ValueError: The partitioner does not support `shares`; `balanced` with "same_count" needs equal shares.

        Example:
            >>> un.data.grouped(["ann", "bob", "ann"]).assign(torch.tensor([0, 1, 2]), [0.5, 0.5], seed=0)
            tensor([0, 1, 0])
        """

    def divide(self, samples: Indices, shares: Sequence[float], seed: int) -> list[Places]:
        ascending, places = samples.all().sort()
        if len(ascending) and int(ascending[-1]) >= len(self._known):
            raise ValueError(
                f"sample {int(ascending[-1])} has no entry: there are only {len(self._known)} {self._name}"
            )
        owners = torch.empty_like(places)
        owners[places] = self.assign(ascending, shares, seed)
        return list(pieces_of(owners, len(shares)))

    def order(self, count: int, shuffle: bool, seed: int, epoch: int, shares: Sequence[float]) -> Indices:
        if len(self._known) != count:
            raise ValueError(f"there are {len(self._known)} {self._name} for {count} samples; pass one for each sample")
        return super().order(count, shuffle, seed, epoch, shares)


def pieces_of(owners: torch.Tensor, parts: int) -> tuple[torch.Tensor, ...]:
    """Return, for each part, the ascending positions at which its number occurs in `owners`."""
    counts = owners.bincount(minlength=parts).tolist() if len(owners) else [0] * parts
    pieces: tuple[torch.Tensor, ...] = owners.argsort(stable=True).split(counts)
    return pieces
