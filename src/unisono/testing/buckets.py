"""Buckets of parameters and the ranks' contributions to them: ordinary numbers and hard cases for codecs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["NUMBERS", "Bucket"]

NUMBERS = ("normal", "zero", "constant", "sparse", "huge", "tiny", "mixed", "outlier")
"""Kinds of contributions."""


@dataclass(frozen=True)
class Bucket:
    """A flat bucket of parameters, and the contribution of each rank.

    Attributes:
        shapes: Shapes of the parameters.
        dtype: Dtype of the bucket.
        numbers: Kind of contributions, one of `NUMBERS`.
        seed: Seed of the contributions.

    Example:
        >>> bucket = Bucket(shapes=[(2, 3), (1,)], numbers="constant")
        >>> bucket.numel, bucket.contribution(rank=1).unique().tolist()
        (7, [1.7000000476837158])
    """

    shapes: Sequence[Sequence[int]]
    dtype: torch.dtype = torch.float32
    numbers: str = "normal"
    seed: int = 0

    @property
    def sizes(self) -> list[torch.Size]:
        """The shapes in the form that codecs take."""
        return [torch.Size(shape) for shape in self.shapes]

    @property
    def numel(self) -> int:
        """Total number of elements."""
        return sum(map(math.prod, self.shapes))

    def contribution(self, rank: int) -> torch.Tensor:
        """Return a rank's contribution: a new tensor with the same values at each call, one-dimensional on the CPU.

        Args:
            rank: The rank, 0 or more.
        """
        generator = torch.Generator().manual_seed(self.seed * 1000 + rank)
        values = torch.randn(self.numel, generator=generator, dtype=torch.float64)
        half = self.dtype == torch.float16
        if self.numbers == "zero":
            values.zero_()
        elif self.numbers == "constant":
            values.fill_(rank + 0.7)
        elif self.numbers == "sparse":
            values *= torch.rand(self.numel, generator=generator) < 0.02
        elif self.numbers == "huge":
            values *= 1e3 if half else 1e30
        elif self.numbers == "tiny":
            values *= 1e-7 if half else 1e-42
        elif self.numbers == "mixed":
            values *= 10.0 ** torch.randint(-4, 4, (self.numel,), generator=generator)
        elif self.numbers == "outlier":
            values[self.numel // 2 : self.numel // 2 + 1] *= 1e3
        return values.to(self.dtype)

    def contributions(self, size: int) -> list[torch.Tensor]:
        """Return the contributions of all ranks.

        Args:
            size: Number of ranks.

        Example:
            >>> [tensor.shape for tensor in Bucket(shapes=[(2, 3)]).contributions(size=2)]
            [torch.Size([6]), torch.Size([6])]
        """
        return [self.contribution(rank) for rank in range(size)]
