"""Recursive halving: ranks exchange halves, quarters, ... of the message with peers at distances 1, 2, 4, ...

Neighbours exchange first, so that sums are balanced. If p is not a power of two, some adjacent ranks form pairs. Each
pair first reduces to its first rank, which leaves q ranks, a power of two. Cost: log2(q) rounds, in which each rank
sends (q-1)/q of the message. If p is not a power of two, there are 2 more rounds, in which one rank of each pair sends
its whole message and then receives its result. Source: Rabenseifner, "Optimization of collective reduction operations",
ICCS 2004, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.butterfly import doubling, halvings, owners
from unisono.collectives.algorithms.fold import extra_ranks, folded, heads
from unisono.collectives.algorithms.step import Cost, Move, Step, move_of

__all__ = ["BALANCED", "cost", "steps"]

BALANCED = True


def steps(rank: int, size: int) -> Iterator[Step]:
    first = heads(size)

    def among(node: int, nodes: int) -> Iterator[Step]:
        def move(peer: int, start: int, stop: int) -> Move:
            owned = owners(doubling, nodes)[start:stop]
            return move_of(peer, (chunk for node in owned for chunk in range(first[node], first[node + 1])))

        yield from halvings(node, nodes, doubling, move)

    yield from folded(rank, size, size, among, scattered=True)


def cost(size: int, numel: int) -> Cost:
    halves = size.bit_length() - 1
    extra = extra_ranks(size)
    return Cost(halves + 2 * extra, halves + extra, numel if extra else numel - numel // size)
