"""Chain broadcast: the message is pipelined from rank to rank in chunks.

Cost: 2(p-1) rounds; every rank sends the message once. Best for long messages among few ranks.
Source: Watts and van de Geijn, "A pipelined broadcast for multidimensional meshes", Parallel
Processing Letters 5(2), 1995.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.step import Cost, Move, Step

__all__ = ["cost", "steps"]


def steps(rank: int, size: int) -> Iterator[Step]:
    first, last = rank == 0, rank == size - 1
    for chunk in range(first, size + 1 - last):
        send = () if last or chunk == 0 else (Move(rank + 1, chunk - 1, chunk),)
        recv = () if first or chunk == size else (Move(rank - 1, chunk, chunk + 1),)
        yield Step(send, recv)


def cost(size: int, numel: int) -> Cost:
    return Cost(2 * (size - 1), size, numel)
