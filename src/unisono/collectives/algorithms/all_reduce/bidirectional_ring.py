"""Bidirectional ring all-reduce: half of the message goes around the ring one way, and half the other way.

Cost: 2(p-1) rounds of 2 messages each; each rank sends the minimum, 2(p-1)/p of the message, half of it in each
direction. Best for long messages over full-duplex links to two neighbours. Source: two opposite rings as in Patarasu
and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_reduce import ring
from unisono.collectives.algorithms.step import Cost, Step

__all__ = ["chunks", "cost", "steps"]


def chunks(size: int) -> int:
    return 2 * size


def steps(rank: int, size: int) -> Iterator[Step]:
    last = size - 1
    for ahead, back in zip(ring.steps(rank, size), ring.steps(last - rank, size), strict=True):
        other = back.renumbered(lambda peer: last - peer, chunk=size)
        yield Step(ahead.send + other.send, ahead.recv + other.recv, ahead.reduce)


def cost(size: int, numel: int) -> Cost:
    return Cost(2 * (size - 1), 4 * (size - 1), 2 * numel - numel // size - (numel + 1) // size)
