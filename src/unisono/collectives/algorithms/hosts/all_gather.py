"""All-gather across hosts with equally many ranks: between ranks with the same place on their hosts, then inside hosts.

`sizes` lists the number of ranks on each host; ranks are numbered host by host. Cost for N hosts with n ranks each: 2
rounds, in which each rank sends N - 1 messages to other hosts, and n - 1 messages inside its host. Each host sends its
own part of the message to every other host once.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.hosts.places import counted
from unisono.collectives.algorithms.step import Cost, Move, Step, move_of, others

__all__ = ["OPTIONS", "cost", "steps"]

OPTIONS: dict[str, tuple[int, ...]] = {"sizes": ()}


def steps(rank: int, size: int, sizes: tuple[int, ...] = ()) -> Iterator[Step]:
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
            tuple(move_of(host * each + other, range(member, size, each)) for other in to),
            tuple(move_of(host * each + other, range(other, size, each)) for other in sources),
        )


def cost(size: int, numel: int, sizes: tuple[int, ...] = ()) -> Cost:
    rounds = (len(sizes) > 1) + (sizes[0] > 1)
    return counted(rounds, lambda rank: steps(rank, size, sizes), size, numel, size)
