"""Assignment of pictures to ranks and steps."""

from __future__ import annotations

from typing import NamedTuple

import torch

from unisono.data import DataPartitioner
from unisono.tools.demo.data import Pictures

__all__ = ["BATCH", "Batches", "StepShare"]

BATCH = 64
"""Maximum pictures of one step over all ranks; more if there are more ranks, because each takes at least one."""


class StepShare(NamedTuple):
    """One rank's share of one step.

    Attributes:
        indices: Indices of its pictures.
        divisor: A sum over them divided by this, averaged over ranks, is the mean over the step's whole batch.
    """

    indices: torch.Tensor
    divisor: float


class Batches:
    """A partition of the pictures for each rank, cut into as many batches as the other ranks have.

    Args:
        pictures: Pictures to train on, at least one per rank.
        ranks: Number of ranks that share them.
        seed: Seed of the partition, and of its order in each epoch.

    Attributes:
        steps: Steps of one epoch.
    """

    def __init__(self, pictures: Pictures, ranks: int, seed: int) -> None:
        partitioner = DataPartitioner(pictures, [1 / ranks] * ranks, seed)
        self._parts = [partitioner.use(rank).indices for rank in range(ranks)]
        self._seed = seed
        self.steps = min(-(-len(pictures) // BATCH), len(pictures) // ranks)

    def of(self, rank: int, epoch: int) -> list[StepShare]:
        """Return the shares of one rank in an epoch: all pictures of its partition, once."""
        counts = [sum(sizes) for sizes in zip(*map(self._sizes, self._parts), strict=True)]
        divisors = [count / len(self._parts) for count in counts]
        return [StepShare(*both) for both in zip(self._cut(rank, epoch), divisors, strict=True)]

    def whole(self, epoch: int) -> list[StepShare]:
        """Return the shares for a single rank to see the same pictures in each step as all ranks together."""
        cuts = [self._cut(rank, epoch) for rank in range(len(self._parts))]
        batches = [torch.cat(parts) for parts in zip(*cuts, strict=True)]
        return [StepShare(batch, len(batch)) for batch in batches]

    def _cut(self, rank: int, epoch: int) -> tuple[torch.Tensor, ...]:
        part = self._parts[rank]
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        return part[torch.randperm(len(part), generator=generator)].tensor_split(self.steps)

    def _sizes(self, part: torch.Tensor) -> list[int]:
        return [len(piece) for piece in part.tensor_split(self.steps)]
