"""Data that differ by rank and by index, so that a result can be checked element by element."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import torch

from unisono.core.tensors import combine
from unisono.core.types import ReduceOp

__all__ = ["PERIOD", "Pattern", "given", "reduced"]

PERIOD = 65521
"""Elements until the data repeats. A prime, so that a shift by any tile or share of a message is detected."""


class Pattern:
    """An endless sequence of values, of which any stretch can be written or compared.

    Args:
        period: The first `PERIOD` of them.
    """

    def __init__(self, period: torch.Tensor) -> None:
        self.period = period
        self._twice = torch.cat([period, period])

    def write(self, tensor: torch.Tensor, start: int = 0) -> None:
        """Fill a one-dimensional tensor with the values from number `start` on."""
        for part, values in self._stretches(tensor, start):
            part.copy_(values)

    def wrong(self, tensor: torch.Tensor, start: int = 0) -> int:
        """Count the elements of a one-dimensional tensor that are not the values from number `start` on."""
        pairs = self._stretches(tensor, start)
        return sum(int((part != values).sum()) for part, values in pairs if not torch.equal(part, values))

    def _stretches(self, tensor: torch.Tensor, start: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pieces of a period's length: avoids a copy as large as the message, and keeps the values in cache."""
        for low in range(0, tensor.numel(), PERIOD):
            part = tensor[low : low + PERIOD]
            offset = (start + low) % PERIOD
            yield part, self._twice[offset : offset + part.numel()]


def given(rank: int, ranks: int, dtype: torch.dtype, op: ReduceOp) -> Pattern:
    """Return a rank's input: whole numbers, so small that every dtype holds every result exactly. None is 0."""
    if dtype is torch.bool:
        above = 2
        scale = 1
    elif op is ReduceOp.PRODUCT:
        above = 3
        scale = 1
    else:
        # Makes an average whole, too.
        scale = ranks if op is ReduceOp.AVG else 1
        above = max(3, 127 // (ranks * scale))
    chance = torch.Generator().manual_seed(rank)
    low = 0 if dtype is torch.bool else 1
    return Pattern((torch.randint(low, above, (PERIOD,), generator=chance) * scale).to(dtype))


def reduced(patterns: list[Pattern], op: ReduceOp) -> Pattern:
    """Return the reduction of all ranks' inputs, in the order of ranks."""

    def both(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        combine(op, low, high, result := torch.empty_like(low))
        return result

    total = reduce(both, [pattern.period for pattern in patterns])
    return Pattern(total / len(patterns) if op is ReduceOp.AVG else total)
