"""Latency-optimal Bine: ranks exchange whole messages along the distance-halving butterfly of negabinary numbers.

Distances are the same as in Swing, but the largest come first: ..., 11, -5, 3, -1, 1. All ranks compute the same sums,
but with operands in different orders, so the bits of NaNs may differ; the algorithm is used only for reductions that do
not round. The number of ranks must be a power of two. Cost: log2(p) rounds; each rank sends log2(p) times the message.
Source: De Sensi et al., "Bine trees: enhancing collective operations by optimizing communication locality", SC 2025.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.butterfly import exchanges, needs_power_of_two, swinging
from unisono.collectives.algorithms.step import Cost, Step

__all__ = ["SAME_BITS", "chunks", "cost", "steps", "unsupported"]

SAME_BITS = False

unsupported = needs_power_of_two


def chunks(size: int) -> int:
    return 1


def steps(rank: int, size: int) -> Iterator[Step]:
    # Swing's steps in reverse order.
    yield from exchanges(rank, size, lambda rank, step, size: swinging(rank, size.bit_length() - 2 - step, size))


def cost(size: int, numel: int) -> Cost:
    rounds = size.bit_length() - 1
    return Cost(rounds, rounds, rounds * numel)
