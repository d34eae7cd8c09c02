"""All-reduce across hosts with any numbers of ranks, in which little data crosses the network.

`sizes` lists the number of ranks on each host; ranks are numbered host by host. On each host, the first n ranks carry
the data between hosts, where n is the number of ranks on the smallest host. A reduce-scatter inside each host gives
each carrier its share; an all-gather inside each host distributes the result. In between, the k-th carriers of all N
hosts reduce their shares. If `short` is 1, this works like `one_shot`, with 1 round, in which each host sends N-1 times
the message. Otherwise, it works like `halving_doubling`, or like `bruck` if N is not a power of two, with 2 log2(N)
rounds, log2(N) rounded up, in which each host sends 2(N-1)/N of the message. For two hosts, that is as much in one
round as in two, but a long message is reduced while it arrives only in two. Source: Mikami et al., "Massively
distributed SGD: ImageNet/ResNet-50 training in a flash", arXiv:1811.05233, 2018.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_reduce import one_shot
from unisono.collectives.algorithms.butterfly import doubling, halvings, needs_power_of_two
from unisono.collectives.algorithms.hosts.places import counted, first_ranks, place_of
from unisono.collectives.algorithms.reduce_scatter import bruck
from unisono.collectives.algorithms.step import Cost, Move, Step, mirrored

__all__ = ["OPTIONS", "chunks", "cost", "steps"]

OPTIONS: dict[str, object] = {"sizes": (), "short": 0}


def chunks(size: int, sizes: tuple[int, ...] = (), short: int = 0) -> int:
    return min(sizes) * _chunks_of_share(len(sizes), short)


def steps(rank: int, size: int, sizes: tuple[int, ...] = (), short: int = 0) -> Iterator[Step]:
    hosts = len(sizes)
    carriers = min(sizes)
    host, member = place_of(rank, sizes)
    firsts = first_ranks(sizes)
    others = [other for other in range(sizes[host]) if other != member]
    length = _chunks_of_share(hosts, short)

    def share(carrier: int, peer: int) -> Move:
        return Move(firsts[host] + peer, carrier * length, carrier * length + length)

    inside = []
    if others:
        send = tuple(share(other, other) for other in others if other < carriers)
        recv = tuple(share(member, other) for other in others if member < carriers)
        inside.append(Step(send, recv, reduce=bool(recv)))
    yield from inside
    if member < carriers and hosts > 1:
        for step in _across(host, hosts, length):
            yield step.renumbered(lambda other: firsts[other] + member, member * length)
    yield from mirrored(inside)


def cost(size: int, numel: int, sizes: tuple[int, ...] = (), short: int = 0) -> Cost:
    hosts = len(sizes)
    length = _chunks_of_share(hosts, short)
    across = (hosts > 1) if length == 1 else 2 * (hosts - 1).bit_length()
    rounds = 2 * (max(sizes) > 1) + across
    return counted(rounds, lambda rank: steps(rank, size, sizes, short), size, numel, chunks(size, sizes, short))


def _chunks_of_share(hosts: int, short: int) -> int:
    """Return how many chunks a share has: 1 if carriers send whole shares, or else the number of hosts."""
    return 1 if short else hosts


def _across(host: int, hosts: int, chunks: int) -> Iterator[Step]:
    """Yield the steps in which one share's carriers reduce it; each carrier has the number of its host."""
    if chunks == 1:
        yield from one_shot.steps(host, hosts)
        return
    reducing = list(bruck.steps(host, hosts) if needs_power_of_two(hosts) else halvings(host, hosts, doubling))
    yield from reducing
    yield from mirrored(reducing)
