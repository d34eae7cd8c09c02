"""Buckets of parameters, and what ranks contribute to them: ordinary numbers, and those that codecs stumble over."""

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
    """A flat bucket of parameters, and what each rank contributes to it.

    Attributes:
        shapes: Of the parameters.
        dtype: Of the bucket.
        numbers: Which kind of contributions, of `NUMBERS`.
        seed: Of the contributions.
    """

    shapes: Sequence[Sequence[int]]
    dtype: torch.dtype = torch.float32
    numbers: str = "normal"
    seed: int = 0

    @property
    def sizes(self) -> list[torch.Size]:
        """The shapes as codecs want them."""
        return [torch.Size(shape) for shape in self.shapes]

    @property
    def numel(self) -> int:
        """Elements in all."""
        return sum(map(math.prod, self.shapes))

    def contribution(self, rank: int) -> torch.Tensor:
        """What this rank gives: made anew, the same at each call."""
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
        """What each of the ranks gives."""
        return [self.contribution(rank) for rank in range(size)]
