"""Swing all-reduce: Swing's reduce_scatter, then the same messages in reverse.

Each rank owns the chunk with its number, so a message consists of several runs of adjacent chunks. The number of ranks
must be a power of two. Cost: 2 log2(p) rounds; each rank sends 2(p-1)/p of the message, which is the minimum. If the
message does not divide evenly into chunks, ranks send different amounts, depending on how many of the longer chunks
they send. Source: De Sensi et al., "Swing: short-cutting rings for higher bandwidth allreduce", NSDI 2024, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.butterfly import needs_power_of_two, owners, swinging
from unisono.collectives.algorithms.reduce_scatter import swing
from unisono.collectives.algorithms.step import Cost, Step, there_and_back

__all__ = ["cost", "steps", "unsupported"]

unsupported = needs_power_of_two


def steps(rank: int, size: int) -> Iterator[Step]:
    yield from there_and_back(swing.steps(rank, size))


def cost(size: int, numel: int) -> Cost:
    rounds = size.bit_length() - 1
    least, longer = divmod(numel, size)
    # Some chunks are one element longer than the others. For each run of adjacent chunks, count its longer chunks, and
    # the longer chunks that its busiest owner sends to other owners in the run. Each pass of the loop merges pairs of
    # neighbouring runs.
    runs = [(int(owner < longer), 0) for owner in owners(swinging, size)]
    while len(runs) > 1:
        pairs = zip(runs[::2], runs[1::2], strict=True)
        runs = [(low + high, low + high + max(some, others)) for (low, some), (high, others) in pairs]
    return Cost(2 * rounds, 2 * rounds, 2 * (size - 1) * least + runs[0][1])
