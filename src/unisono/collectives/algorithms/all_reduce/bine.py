"""Bine all-reduce: recursive halving along a negabinary butterfly, nearest peers first; then all steps in reverse.

Peers are the same as in Swing. Chunks are in the order in which the butterfly reaches their owners, not in rank order,
so that each message is one contiguous run. The number of ranks must be a power of two. Cost: 2 log2(p) rounds; each
rank sends 2(p-1)/p of the message, which is the minimum. Source: De Sensi et al., "Bine trees: enhancing collective
operations by optimizing communication locality", SC 2025.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_reduce import halving_doubling
from unisono.collectives.algorithms.butterfly import halvings, needs_power_of_two, swinging
from unisono.collectives.algorithms.step import Cost, Step, there_and_back

__all__ = ["cost", "steps", "unsupported"]

unsupported = needs_power_of_two


def steps(rank: int, size: int) -> Iterator[Step]:
    yield from there_and_back(halvings(rank, size, swinging))


def cost(size: int, numel: int) -> Cost:
    return halving_doubling.cost(size, numel)
