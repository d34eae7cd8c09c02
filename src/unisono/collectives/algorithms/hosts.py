"""Steps of collectives among ranks on several hosts, for transports that know their hosts.

They are not in the registry, and declare no cost, because such a transport uses them whenever there are any. `sizes`
lists the number of ranks on each host; ranks are numbered host by host. In a rooted collective, rank 0 is the root.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from unisono.collectives.algorithms.all_reduce import one_shot
from unisono.collectives.algorithms.broadcast import binomial
from unisono.collectives.algorithms.butterfly import doubling, halvings, needs_power_of_two
from unisono.collectives.algorithms.reduce_scatter import bruck
from unisono.collectives.algorithms.step import Move, Step, mirrored, move_of, others, there_and_back

__all__ = ["EVEN", "across_hosts"]

EVEN = frozenset({"all_gather", "reduce_scatter"})
"""Collectives whose steps need equally many ranks on each host."""


def across_hosts(
    collective: str, rank: int, sizes: Sequence[int], *, short: bool = False
) -> tuple[int, Iterator[Step]] | None:
    """Return the number of chunks, and a rank's steps, or None if there are none for these hosts.

    Args:
        collective: Name of the collective.
        rank: The rank, in the order of the hosts.
        sizes: Number of ranks on each host.
        short: Whether an all_reduce is so short that the number of rounds matters more than the traffic.

    Example:
        >>> chunks, steps = across_hosts("broadcast", 3, (3, 1))
        >>> chunks, list(steps)
        (1, [Step(send=(), recv=(Move(peer=0, start=0, stop=1, further=()),), reduce=False)])
        >>> across_hosts("all_gather", 3, (3, 1)) is None
        True
    """
    if collective == "all_reduce":
        share = 1 if short else len(sizes)
        return min(sizes) * share, _all_reduce(rank, sizes, share)
    if collective == "broadcast":
        return 1, _broadcast(rank, sizes)
    if collective == "reduce":
        return 1, mirrored(_broadcast(rank, sizes), reduce=True)
    if collective in EVEN and len(set(sizes)) == 1:
        gathering = _all_gather(rank, sizes)
        return sum(sizes), gathering if collective == "all_gather" else mirrored(gathering, reduce=True)
    return None


def _all_gather(rank: int, sizes: Sequence[int]) -> Iterator[Step]:
    """Yield the steps between ranks with the same place on their hosts, then those inside the host.

    Cost for N hosts with n ranks each: 2 rounds, in which each rank sends N - 1 messages to other hosts, and n - 1
    messages inside its host. Each host sends its own part of the message to every other host once. A reduce_scatter is
    these steps in reverse: 2 rounds, in which each rank sends n - 1 messages inside its host, and N - 1 to other hosts.
    """
    each = sizes[0]
    host, member = divmod(rank, each)
    to, sources = others(host, len(sizes))
    if to:
        yield Step(
            tuple(Move(other * each + member, rank, rank + 1) for other in to),
            tuple(Move(peer, peer, peer + 1) for peer in (other * each + member for other in sources)),
        )
    to, sources = others(member, each)
    if to:
        yield Step(
            tuple(move_of(host * each + other, range(member, sum(sizes), each)) for other in to),
            tuple(move_of(host * each + other, range(other, sum(sizes), each)) for other in sources),
        )


def _all_reduce(rank: int, sizes: Sequence[int], share: int) -> Iterator[Step]:
    """Yield the steps of an all_reduce in which little data crosses the network.

    On each host, the first n ranks carry the data between hosts, where n is the number of ranks on the smallest host. A
    reduce-scatter inside each host gives each carrier its share of `share` chunks; an all-gather inside each host
    distributes the result. In between, the k-th carriers of all N hosts reduce their shares. A share of a single chunk
    is reduced as in `one_shot`, with 1 round, in which each host sends N-1 times the message. Otherwise, it is reduced
    as in `halving_doubling`, or as in `bruck` if N is not a power of two, with 2 log2(N) rounds, log2(N) rounded up, in
    which each host sends 2(N-1)/N of the message. For two hosts, that is as much in one round as in two, but a long
    message is reduced while it arrives only in two. Source: Mikami et al., "Massively distributed SGD:
    ImageNet/ResNet-50 training in a flash", arXiv:1811.05233, 2018.
    """
    hosts = len(sizes)
    carriers = min(sizes)
    firsts, host, member = _place(rank, sizes)
    neighbours = [other for other in range(sizes[host]) if other != member]

    def move(peer: int, carrier: int) -> Move:
        return Move(firsts[host] + peer, carrier * share, carrier * share + share)

    inside = []
    if neighbours:
        send = tuple(move(other, other) for other in neighbours if other < carriers)
        recv = tuple(move(other, member) for other in neighbours if member < carriers)
        inside.append(Step(send, recv, reduce=bool(recv)))
    yield from inside
    if member < carriers and hosts > 1:
        for step in _across(host, hosts, share):
            yield step.renumbered(lambda other: firsts[other] + member, member * share)
    yield from mirrored(inside)


def _across(host: int, hosts: int, share: int) -> Iterator[Step]:
    """Yield the steps in which one share's carriers reduce it; each carrier has the number of its host."""
    if share == 1:
        yield from one_shot.steps(host, hosts)
        return
    reducing = bruck.steps(host, hosts) if needs_power_of_two(hosts) else halvings(host, hosts, doubling)
    yield from there_and_back(reducing)


def _broadcast(rank: int, sizes: Sequence[int]) -> Iterator[Step]:
    """Yield the steps along a binomial tree over the hosts, then those inside the host.

    Cost: log2(N) rounds for N hosts, and log2(n) for n ranks on the largest host, each rounded up. The message enters
    each host once. A reduce is these steps in reverse; its cost is as for the broadcast, but each rank except the root
    sends one message. Source: Karonis et al., "Exploiting hierarchy in parallel computer networks to optimize
    collective operation performance", IPDPS 2000.
    """
    firsts, host, member = _place(rank, sizes)
    if member == 0:
        yield from (step.renumbered(firsts.__getitem__) for step in binomial.steps(host, len(sizes)))
    yield from (step.renumbered(firsts[host].__add__) for step in binomial.steps(member, sizes[host]))


def _place(rank: int, sizes: Sequence[int]) -> tuple[list[int], int, int]:
    """Return the first rank on each host, the number of a rank's host, and the rank's number on that host.

    Example:
        >>> _place(4, (3, 1, 2))
        ([0, 3, 4], 2, 0)
    """
    firsts = [0, *accumulate(sizes[:-1])]
    host = bisect_right(firsts, rank) - 1
    return firsts, host, rank - firsts[host]
