"""Bruck all-reduce: Bruck's reduce_scatter, then the same messages in reverse.

Cost: 2 log2(p) rounds, with log2(p) rounded up, for any number of ranks p; each rank sends 2(p-1)/p of the message,
which is the minimum. Source: Träff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms", arXiv 2410.14234,
2024; see also `reduce_scatter/bruck.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.butterfly import halvings_cost
from unisono.collectives.algorithms.reduce_scatter import bruck
from unisono.collectives.algorithms.step import Cost, Step, there_and_back

__all__ = ["cost", "steps"]


def steps(rank: int, size: int) -> Iterator[Step]:
    yield from there_and_back(bruck.steps(rank, size))


def cost(size: int, numel: int) -> Cost:
    runs = [run for _, run in bruck.runs(size)]
    return Cost(2 * len(runs), 2 * len(runs), halvings_cost(numel, size, runs))
