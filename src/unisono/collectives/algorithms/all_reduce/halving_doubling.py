"""Halving and doubling: ranks exchange halves, quarters, ... until each owns a chunk; then the steps run in reverse.

Neighbours exchange first, and distances double in each round, so that sums are balanced. If p is not a power of two,
some adjacent ranks form pairs. Each pair first reduces to its first rank, which leaves q ranks, a power of two. At the
end, the first rank of each pair sends the result to the second. Cost: 2 log2(q) rounds; each rank sends 2(q-1)/q of the
message, which is the minimum. If p is not a power of two, there are 2 more rounds, in each of which some ranks send a
whole message. Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004, section 3; for pairs
of ranks, Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005, section 4.5.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.butterfly import doubling, halvings, halvings_cost
from unisono.collectives.algorithms.fold import extra_ranks, folded, nodes_of
from unisono.collectives.algorithms.step import Cost, Step, there_and_back

__all__ = ["BALANCED", "chunks", "cost", "steps"]

BALANCED = True


def chunks(size: int) -> int:
    return nodes_of(size)


def steps(rank: int, size: int) -> Iterator[Step]:
    def among(node: int, nodes: int) -> Iterator[Step]:
        return there_and_back(halvings(node, nodes, doubling))

    yield from folded(rank, size, chunks(size), among)


def cost(size: int, numel: int) -> Cost:
    halves = size.bit_length() - 1
    extra = extra_ranks(size)
    nodes = nodes_of(size)
    sent = halvings_cost(numel, nodes, [nodes >> half for half in range(1, halves + 1)])
    return Cost(2 * halves + 2 * extra, 2 * halves + extra, sent + extra * numel)
