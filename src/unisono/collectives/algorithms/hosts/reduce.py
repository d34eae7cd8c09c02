"""Reduce across hosts with any numbers of ranks: the steps of the broadcast across hosts, in reverse.

`sizes` lists the number of ranks on each host; ranks are numbered host by host. Cost: the same as for the broadcast,
but each rank except the root sends one message.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.hosts import broadcast
from unisono.collectives.algorithms.hosts.places import counted
from unisono.collectives.algorithms.step import Cost, Step, mirrored

__all__ = ["OPTIONS", "chunks", "cost", "steps"]

OPTIONS: dict[str, tuple[int, ...]] = {"sizes": ()}


def chunks(size: int, sizes: tuple[int, ...] = ()) -> int:
    return 1


def steps(rank: int, size: int, sizes: tuple[int, ...] = ()) -> Iterator[Step]:
    yield from mirrored(broadcast.steps(rank, size, sizes), reduce=True)


def cost(size: int, numel: int, sizes: tuple[int, ...] = ()) -> Cost:
    rounds = broadcast.cost(size, numel, sizes).rounds
    return counted(rounds, lambda rank: steps(rank, size, sizes), size, numel, 1)
