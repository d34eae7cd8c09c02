"""Bruck reduce-scatter: partial sums move towards their owners over distances that halve in every round.

The algorithm is Bruck's all_gather in reverse, and generalizes recursive halving from powers of two to any number of
ranks. Cost: log2(p) rounds, rounded up; each rank sends (p-1)/p of the message. The number of rounds and the bytes sent
are both minimal. Source: Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing
systems", IEEE TPDS 8(11), 1997, section 4; as a reduce_scatter, Bernaschi, Iannello and Lauria, "Efficient
implementation of reduce-scatter in MPI", Journal of Systems Architecture 49(3), 2003.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.step import Cost, Step, move_of

__all__ = ["cost", "runs", "steps"]


def runs(size: int) -> list[tuple[int, int]]:
    """Return the distance of each round, and the number of chunks that each rank sends in that round."""
    distances = [1 << bit for bit in reversed(range((size - 1).bit_length()))]
    return [(distance, min(distance, size - distance)) for distance in distances]


def steps(rank: int, size: int) -> Iterator[Step]:
    for distance, run in runs(size):
        ahead = (rank + distance) % size
        behind = (rank - distance) % size
        yield Step(
            (move_of(ahead, ((ahead + chunk) % size for chunk in range(run))),),
            (move_of(behind, ((rank + chunk) % size for chunk in range(run))),),
            reduce=True,
        )


def cost(size: int, numel: int) -> Cost:
    rounds = (size - 1).bit_length()
    return Cost(rounds, rounds, numel - numel // size)
