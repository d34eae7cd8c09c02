"""Partitioners that look at each sample to assign it to a part."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from unisono.data.indices import Indices, Places
from unisono.data.partitioner import Partitioner

__all__ = ["AssignmentPartitioner", "pieces_of"]


class AssignmentPartitioner(Partitioner):
    """Base of partitioners that assign each sample to a part by its content, not by its place in the order.

    So parts stay the same from epoch to epoch, and each is shuffled in itself. Costs some 50 bytes a sample on
    every rank while it divides, and 8 after.

    Args:
        known: One value for each sample of the dataset; one-dimensional, on the CPU.
        name: Name of these values in error texts.
    """

    def __init__(self, known: torch.Tensor, name: str) -> None:
        self._known = known
        self._name = name

    @abstractmethod
    def assign(self, samples: torch.Tensor, shares: Sequence[float], seed: int) -> torch.Tensor:
        """Return the part number of each sample: int64, one-dimensional.

        Args:
            samples: Dataset indices, ascending: int64, one-dimensional, on the CPU.
            shares, seed: As in `divide`.

        Raises:
            ValueError: The partitioner cannot make these shares: `balanced` with "same_count" needs equal ones.

        Example:
            >>> un.data.grouped(["ann", "bob", "ann"]).assign(torch.tensor([0, 1, 2]), [0.5, 0.5], seed=0)
            tensor([0, 1, 0])
        """

    def divide(self, samples: Indices, shares: Sequence[float], seed: int) -> list[Places]:
        ascending, places = self._known_samples(samples).sort()
        owners = torch.empty_like(places)
        owners[places] = self.assign(ascending, shares, seed)
        return list(pieces_of(owners, len(shares)))

    def order(self, count: int, shuffle: bool, seed: int, epoch: int, shares: Sequence[float]) -> Indices:
        if len(self._known) != count:
            raise ValueError(f"there are {len(self._known)} {self._name} for {count} samples; pass one for each sample")
        return super().order(count, shuffle, seed, epoch, shares)

    def _known_samples(self, samples: Indices) -> torch.Tensor:
        """Return the dataset indices of these samples; raise `ValueError` if one has no known value."""
        found = samples.all()
        if len(found) and int(found.max()) >= len(self._known):
            raise ValueError(f"sample {int(found.max())} has no entry: there are only {len(self._known)} {self._name}")
        return found


def pieces_of(owners: torch.Tensor, parts: int) -> tuple[torch.Tensor, ...]:
    """Return, for each part, the places of its number in `owners`, ascending."""
    counts = owners.bincount(minlength=parts).tolist() if len(owners) else [0] * parts
    pieces: tuple[torch.Tensor, ...] = owners.argsort(stable=True).split(counts)
    return pieces
