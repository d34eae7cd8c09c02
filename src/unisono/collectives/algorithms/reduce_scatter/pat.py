"""PAT reduce-scatter (parallel aggregated trees): the all-gather of the same name, in reverse.

Cost: log2(p) rounds, rounded up, for any number of ranks p; each rank sends about (p-1)/p of the message. Source:
Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale", 2025, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_gather import pat as all_gather
from unisono.collectives.algorithms.step import Cost, Step, mirrored

__all__ = ["cost", "steps"]


def steps(rank: int, size: int) -> Iterator[Step]:
    return mirrored(all_gather.steps(rank, size), reduce=True)


def cost(size: int, numel: int) -> Cost:
    rounds = (size - 1).bit_length()
    return Cost(rounds, rounds, numel - numel // size)
