"""Halving and doubling: exchange halves, quarters, ... until each of q ranks owns a chunk; then in reverse.

Ranks beyond the power of two q exchange chunks with each owner directly. Cost: 2 log2(q) rounds, (2(q-1) + p-q)/q of
the message. Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004, for p = q.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.step import Cost, Move, Step, elements

__all__ = ["chunks", "cost", "steps"]


def chunks(size: int) -> int:
    return 1 << (size.bit_length() - 1)


def steps(rank: int, size: int) -> Iterator[Step]:
    doublings = list(_doublings(rank, size, owners=chunks(size)))
    yield from (Step(send=step.recv, recv=step.send, reduce=True) for step in reversed(doublings))
    yield from doublings


def _doublings(rank: int, size: int, owners: int) -> Iterator[Step]:
    if rank >= owners:
        yield Step(recv=tuple(Move(owner, owner, owner + 1) for owner in range(owners)))
        return
    beyond = tuple(Move(peer, rank, rank + 1) for peer in range(owners, size))
    for run in (1 << bit for bit in range(owners.bit_length() - 1)):
        mine, theirs = rank // run * run, (rank ^ run) // run * run
        yield Step((Move(rank ^ run, mine, mine + run), *beyond), (Move(rank ^ run, theirs, theirs + run),))
        beyond = ()


def cost(size: int, numel: int) -> Cost:
    doublings, owners = size.bit_length() - 1, chunks(size)
    beyond = size - owners
    runs = sum(elements(numel, owners, 0, 1 << bit) for bit in range(1, doublings))
    sent = numel + runs + beyond * elements(numel, owners)
    return Cost(2 * doublings, max(2 * doublings + beyond, owners * (beyond > 0)), sent)
