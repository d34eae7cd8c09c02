"""Halving and doubling: exchange halves, quarters, ... until each of q ranks owns a chunk; then in reverse.

Neighbours exchange halves, and distances double, so that sums are balanced. Beyond a power of two q, pairs of adjacent
ranks are reduced first, and the result is shared at the end. Cost: 2 log2(q) rounds, 2(q-1)/q of the message, the least
possible; beyond a power of two, 2 more rounds and 1 more message, which is a whole one.
Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004, section 3; the fold of whole
messages is that of Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005, section 4.5.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.butterfly import doubling, halvings, halvings_cost
from unisono.collectives.algorithms.fold import extra_ranks, folded, nodes_of
from unisono.collectives.algorithms.step import Cost, Step, mirrored

__all__ = ["BALANCED", "chunks", "cost", "steps"]

BALANCED = True


def chunks(size: int) -> int:
    return nodes_of(size)


def steps(rank: int, size: int) -> Iterator[Step]:
    def among(node: int, nodes: int) -> Iterator[Step]:
        yield from halvings(node, nodes, doubling)
        yield from mirrored(halvings(node, nodes, doubling))

    yield from folded(rank, size, chunks(size), among)


def cost(size: int, numel: int) -> Cost:
    halves = size.bit_length() - 1
    extra = extra_ranks(size)
    nodes = nodes_of(size)
    sent = halvings_cost(numel, nodes, [nodes >> half for half in range(1, halves + 1)])
    return Cost(2 * halves + 2 * extra, 2 * halves + extra, sent + extra * numel)
