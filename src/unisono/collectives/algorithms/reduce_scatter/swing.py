"""Swing reduce-scatter: halving with peers at distances 1, -1, 3, -5, 11, ..., which swing from side to side.

On a ring or torus, messages cross fewer links than with distances 1, 2, 4, ... The number of ranks must be a power of
two. Cost: log2(p) rounds; each rank sends (p-1)/p of the message. Source: De Sensi et al., "Swing: short-cutting rings
for higher bandwidth allreduce", NSDI 2024, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.butterfly import halvings, needs_power_of_two, owners, swinging
from unisono.collectives.algorithms.step import Cost, Move, Step, move_of

__all__ = ["cost", "steps", "unsupported"]

unsupported = needs_power_of_two


def steps(rank: int, size: int) -> Iterator[Step]:
    def move(peer: int, start: int, stop: int) -> Move:
        return move_of(peer, owners(swinging, size)[start:stop])

    yield from halvings(rank, size, swinging, move)


def cost(size: int, numel: int) -> Cost:
    rounds = size.bit_length() - 1
    return Cost(rounds, rounds, numel - numel // size)
