"""Latency-optimal Swing: ranks exchange whole messages with peers at distances 1, -1, 3, -5, 11, ...

Each rank reduces in a different order, so the algorithm is used only for reductions that do not round. The number of
ranks must be a power of two. Cost: log2(p) rounds; each rank sends log2(p) times the message. Source: De Sensi et al.,
"Swing: short-cutting rings for higher bandwidth allreduce", NSDI 2024, section 3.
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
    yield from exchanges(rank, size, swinging)


def cost(size: int, numel: int) -> Cost:
    rounds = size.bit_length() - 1
    return Cost(rounds, rounds, rounds * numel)
