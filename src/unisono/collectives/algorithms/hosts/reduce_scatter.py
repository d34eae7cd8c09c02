"""Reduce-scatter across hosts with equally many ranks: the steps of the all-gather across hosts, in reverse.

`sizes` lists the number of ranks on each host; ranks are numbered host by host. Cost for N hosts with n ranks each: 2
rounds, in which each rank sends n - 1 messages inside its host, and N - 1 messages to other hosts.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.hosts import all_gather
from unisono.collectives.algorithms.hosts.places import counted
from unisono.collectives.algorithms.step import Cost, Step, mirrored

__all__ = ["OPTIONS", "cost", "steps"]

OPTIONS: dict[str, tuple[int, ...]] = {"sizes": ()}


def steps(rank: int, size: int, sizes: tuple[int, ...] = ()) -> Iterator[Step]:
    yield from mirrored(all_gather.steps(rank, size, sizes), reduce=True)


def cost(size: int, numel: int, sizes: tuple[int, ...] = ()) -> Cost:
    rounds = all_gather.cost(size, numel, sizes).rounds
    return counted(rounds, lambda rank: steps(rank, size, sizes), size, numel, size)
