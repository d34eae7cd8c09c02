"""All-reduce across hosts with any numbers of ranks, in which little data crosses the network.

`sizes` are the numbers of ranks on the hosts, which have consecutive ranks. On each host, the first n ranks carry the
data between hosts, where n is the number of ranks on the smallest host. A reduce-scatter inside each host gives each
carrier its share; the k-th carriers of all hosts reduce theirs like `halving_doubling`, or like `bruck` if the number
of hosts is not a power of two; the same steps in reverse distribute the result. Cost: 2 rounds inside the hosts and,
for N hosts, 2 log2(N) rounds, rounded up, in which each host sends 2(N-1)/N of the message. Source: Mikami et al.,
"Massively distributed SGD: ImageNet/ResNet-50 training in a flash", arXiv:1811.05233, 2018.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.butterfly import doubling, halvings, needs_power_of_two
from unisono.collectives.algorithms.hosts.places import counted, first_ranks, place_of
from unisono.collectives.algorithms.reduce_scatter import bruck
from unisono.collectives.algorithms.step import Cost, Move, Step, mirrored

__all__ = ["OPTIONS", "chunks", "cost", "steps"]

OPTIONS: dict[str, tuple[int, ...]] = {"sizes": ()}


def chunks(size: int, sizes: tuple[int, ...] = ()) -> int:
    return min(sizes) * len(sizes)


def steps(rank: int, size: int, sizes: tuple[int, ...] = ()) -> Iterator[Step]:
    hosts = len(sizes)
    carriers = min(sizes)
    host, member = place_of(rank, sizes)
    firsts = first_ranks(sizes)
    others = [other for other in range(sizes[host]) if other != member]

    def share(carrier: int, peer: int) -> Move:
        return Move(firsts[host] + peer, carrier * hosts, carrier * hosts + hosts)

    reducing = []
    if others:
        send = tuple(share(other, other) for other in others if other < carriers)
        recv = tuple(share(member, other) for other in others if member < carriers)
        reducing.append(Step(send, recv, reduce=bool(recv)))
    if member < carriers:
        across = bruck.steps(host, hosts) if needs_power_of_two(hosts) else halvings(host, hosts, doubling)
        reducing += [step.renumbered(lambda other: firsts[other] + member, member * hosts) for step in across]
    yield from reducing
    yield from mirrored(reducing)


def cost(size: int, numel: int, sizes: tuple[int, ...] = ()) -> Cost:
    rounds = 2 * ((max(sizes) > 1) + (len(sizes) - 1).bit_length())
    return counted(rounds, lambda rank: steps(rank, size, sizes), size, numel, chunks(size, sizes))
