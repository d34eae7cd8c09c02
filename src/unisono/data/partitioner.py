"""What a partitioner is: the order of an epoch's samples, and which of them are whose."""

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
    """What a partitioner states of the balance of its parts.

    Attributes:
        what: What is measured, such as "samples".
        load: How much of it some samples have.
        least, most: For each part the bounds of its load, both included.
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
    """Deals the samples of an epoch to parts. It holds no state: the same arguments give the same parts everywhere.

    Every sample goes to exactly one part. That, and the bounds that a partitioner states, are checked by
    `unisono.testing.partitioners` for every one that has a name.

    Attributes:
        shuffles: Whether an epoch is shuffled if nobody says otherwise.
        interleaves: Whether equal parts take turns (part r of p has places r, r + p, r + 2p, ...), so that what all
            have taken together is the first so many places. Then the global order does not depend on
            the number of parts.
        in_step: Whether parts may be expected to be used at the same pace.
    """

    shuffles: ClassVar[bool] = True
    interleaves: ClassVar[bool] = False
    in_step: bool = True

    @classmethod
    def of(cls, dataset: Any) -> Self:
        """The partitioner of this name for a dataset; what it needs to know beyond a length, the dataset tells."""
        return cls()

    def order(self, count: int, shuffle: bool, seed: int, epoch: int, shares: Sequence[float]) -> Indices:
        """The samples in the order in which an epoch that begins with these parts comes to them."""
        return IndexShuffle(count, seed, epoch) if shuffle else Counted(count)

    @abstractmethod
    def divide(self, samples: Indices, shares: Sequence[float], seed: int) -> list[Places]:
        """For each part its places in `samples`, ascending.

        Args:
            samples: All of an epoch, or what is left of it.
            shares: The fraction of each part, as checked by `apportion`.
            seed: For what is left to chance. Parts do not depend on the epoch, unless its order makes them.
        """

    def bounds(self, samples: Indices, shares: Sequence[float]) -> list[Bound]:
        """What holds of the parts of `samples`: each is less than one sample away from its share."""
        return [Bound.around("samples", len, len(samples), shares, 1)]

    def together(self, samples: torch.Tensor) -> torch.Tensor | None:
        """For each of these samples a number; those of one number are never in two parts. None: nothing is promised."""
        return None

    def settings(self) -> dict[str, Any]:
        """What may differ when a job goes on with another number of parts; plain values for `replaced`."""
        return {}

    def replaced(self, settings: dict[str, Any]) -> Partitioner:
        """The same with settings of an earlier time."""
        return self

    def fingerprint(self) -> str:
        """Equal for partitioners that deal alike, and different otherwise as well as a digest can tell."""
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
