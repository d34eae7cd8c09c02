"""Scatter and all-gather: rank 0 scatters the chunks along a tree, then a ring all-gathers them.

Cost: log2(p) (rounded up) + p - 1 rounds; rank 0 sends 2(p-1)/p of the message. Best for long messages.
Source: Barnett, Shuler, van de Geijn, Gupta, Payne and Watts, "Interprocessor collective
communication library (InterCom)", SHPCC 1994.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_gather import ring
from unisono.collectives.algorithms.scatter import binomial
from unisono.collectives.algorithms.step import Cost, Step, elements

__all__ = ["cost", "steps"]


def steps(rank: int, size: int) -> Iterator[Step]:
    yield from binomial.steps(rank, size)
    yield from ring.steps(rank, size)


def cost(size: int, numel: int) -> Cost:
    depth = (size - 1).bit_length()
    return Cost(depth + size - 1, depth + size - 1, 2 * numel - elements(numel, size, 0, 2))
