"""Recursive doubling: ranks exchange their partial results with a peer at a distance that doubles every round.

Each rank beyond a power of two first sends its message to a partner below it, and receives the result at the end.
Cost: log2(p) rounds and messages; beyond a power of two 2 rounds and 1 message more. Best for short messages.
Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.step import Cost, Move, Step

__all__ = ["chunks", "cost", "steps"]


def chunks(size: int) -> int:
    return 1


def steps(rank: int, size: int) -> Iterator[Step]:
    core = 1 << (size.bit_length() - 1)
    twin = (Move(rank ^ core, 0, 1),)
    if rank >= core:
        yield from (Step(send=twin), Step(recv=twin))
        return
    if rank + core < size:
        yield Step(recv=twin, reduce=True)
    for distance in (1 << bit for bit in range(core.bit_length() - 1)):
        peer = (Move(rank ^ distance, 0, 1),)
        yield Step(peer, peer, reduce=True)
    if rank + core < size:
        yield Step(send=twin)


def cost(size: int, numel: int) -> Cost:
    doublings, beyond = size.bit_length() - 1, size & (size - 1) > 0
    return Cost(doublings + 2 * beyond, doublings + beyond, (doublings + beyond) * numel)
