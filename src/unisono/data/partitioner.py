"""Base class of partitioners: the order of an epoch's samples, and their assignment to parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from unisono.core.registry import Registry
from unisono.data.feistel import IndexShuffle
from unisono.data.indices import Counted, Indices, Places

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
    partitioner states, for every partitioner with a name.

    Attributes:
        shuffles: Whether an epoch is shuffled by default.
        interleaves: Whether equal parts take turns (part r of p has places r, r + p, r + 2p, ...), so that the
            samples used by all parts together are a prefix of the order. The global order then does not depend on
            the number of parts.
        in_step: Whether parts may be expected to be used at the same pace.
    """

    shuffles: ClassVar[bool] = True
    interleaves: ClassVar[bool] = False
    in_step: bool = True

    @classmethod
    def of(cls, dataset: Any) -> Self:
        """Return a partitioner for a dataset, which supplies what the partitioner needs beyond a length."""
        return cls()

    def order(self, count: int, shuffle: bool, seed: int, epoch: int, shares: Sequence[float]) -> Indices:
        """Return the samples in the order of an epoch that begins with these parts."""
        return IndexShuffle(count, seed, epoch) if shuffle else Counted(count)

    @abstractmethod
    def divide(self, samples: Indices, shares: Sequence[float], seed: int) -> list[Places]:
        """Return the places of each part in `samples`, ascending.

        Args:
            samples: All of an epoch, or what is left of it.
            shares: The fraction of each part, as checked by `apportion`.
            seed: For what is left to chance. Parts do not depend on the epoch, unless its order makes them.
        """

    def bounds(self, samples: Indices, shares: Sequence[float]) -> list[Bound]:
        """Return the bounds of the parts of `samples`: each is less than one sample away from its share."""
        return [Bound.around("samples", len, len(samples), shares, 1)]

    def together(self, samples: torch.Tensor) -> torch.Tensor | None:
        """Return a number for each sample; samples of one number are never in two parts. None: no guarantee."""
        return None

    def settings(self) -> dict[str, Any]:
        """Return what may differ when a job resumes with another number of parts: plain values for `replaced`."""
        return {}

    def replaced(self, settings: dict[str, Any]) -> Partitioner:
        """Return this partitioner with earlier settings."""
        return self

    def fingerprint(self) -> str:
        """Return a digest that is equal for partitioners that deal alike, and otherwise different up to collisions."""
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
