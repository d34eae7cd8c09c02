"""Pipelined chain broadcast: the message travels from rank to rank in segments.

Cost: p - 2 + k rounds for k segments; each rank except the last sends the whole message once. Best for long messages
among few ranks. Source: Watts and van de Geijn, "A pipelined broadcast for multidimensional meshes", Parallel
Processing Letters 5(2), 1995.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.step import Cost, Move, Step

__all__ = ["OPTIONS", "chunks", "cost", "steps"]

OPTIONS = {"segments": 8}


def chunks(size: int, segments: int = 8) -> int:
    return segments


def steps(rank: int, size: int, segments: int = 8) -> Iterator[Step]:
    first = rank == 0
    last = rank == size - 1
    for chunk in range(first, segments + 1 - last):
        send = () if last or chunk == 0 else (Move(rank + 1, chunk - 1, chunk),)
        recv = () if first or chunk == segments else (Move(rank - 1, chunk, chunk + 1),)
        yield Step(send, recv)


def cost(size: int, numel: int, segments: int = 8) -> Cost:
    return Cost(size - 2 + segments, segments, numel)
