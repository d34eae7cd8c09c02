"""Broadcast across hosts with any numbers of ranks: along a binomial tree over the hosts, then inside each host.

`sizes` lists the number of ranks on each host; ranks are numbered host by host. Cost: log2(N) rounds for N hosts, and
log2(n) for n ranks on the largest host, each rounded up. The message enters each host once. Source: Karonis et al.,
"Exploiting hierarchy in parallel computer networks to optimize collective operation performance", IPDPS 2000.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.broadcast import binomial
from unisono.collectives.algorithms.hosts.places import counted, first_ranks, place_of
from unisono.collectives.algorithms.step import Cost, Step

__all__ = ["OPTIONS", "chunks", "cost", "steps"]

OPTIONS: dict[str, tuple[int, ...]] = {"sizes": ()}


def chunks(size: int, sizes: tuple[int, ...] = ()) -> int:
    return 1


def steps(rank: int, size: int, sizes: tuple[int, ...] = ()) -> Iterator[Step]:
    host, member = place_of(rank, sizes)
    firsts = first_ranks(sizes)
    if member == 0:
        yield from (step.renumbered(firsts.__getitem__) for step in binomial.steps(host, len(sizes)))
    yield from (step.renumbered(firsts[host].__add__) for step in binomial.steps(member, sizes[host]))


def cost(size: int, numel: int, sizes: tuple[int, ...] = ()) -> Cost:
    return counted(_rounds(sizes), lambda rank: steps(rank, size, sizes), size, numel, 1)


def _rounds(sizes: tuple[int, ...]) -> int:
    hosts = len(sizes)
    # For each host, the number of rounds until its first rank has sent its last message to another host.
    ended = [0] * hosts
    for bit in reversed(range((hosts - 1).bit_length())):
        for host in range(0, hosts - (1 << bit), 2 << bit):
            ended[host] += 1
            ended[host + (1 << bit)] = ended[host]
    return max(rounds + (ranks - 1).bit_length() for rounds, ranks in zip(ended, sizes, strict=True))
