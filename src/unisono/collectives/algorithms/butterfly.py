"""Butterfly exchanges among a power-of-two number of ranks: in each step, every rank exchanges data with one peer.

A place is a part of the message that one rank owns at the end. Places are ordered so that every message of a reduction
is contiguous: whichever peers are used, a message contains the places of all ranks that its receiver can reach in the
remaining steps, and these places are adjacent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from unisono.collectives.algorithms.step import Move, Step, elements

__all__ = [
    "Peer",
    "doubling",
    "exchanges",
    "halvings",
    "halvings_cost",
    "needs_power_of_two",
    "owners",
    "places",
    "swinging",
]

Peer = Callable[[int, int, int], int]
"""Function that, given a rank, a step (from 0) and the number of ranks, returns the rank's peer."""


def doubling(rank: int, step: int, size: int) -> int:
    """Return the peer at distance 1, 2, 4, ...: its rank differs from `rank` in one bit."""
    return rank ^ 1 << step


def swinging(rank: int, step: int, size: int) -> int:
    """Return the peer at distance 1, -1, 3, -5, 11, ... (sums of powers of -2), with opposite signs for odd ranks.

    Example:
        >>> [swinging(0, step, 16) for step in range(4)]
        [1, 15, 3, 11]
    """
    distance: int = (1 - (-2) ** (step + 1)) // 3
    return (rank + (-distance if rank % 2 else distance)) % size


def needs_power_of_two(size: int) -> str:
    """Return an empty string if `size` is a power of two, or else the reason why the algorithm does not support it."""
    return f"needs a power of two, not {size} ranks" if size & (size - 1) else ""


@lru_cache(maxsize=16)
def owners(peer: Peer, size: int) -> tuple[int, ...]:
    """Return the rank that owns each place.

    Example:
        >>> owners(doubling, 8), owners(swinging, 8)
        ((0, 4, 2, 6, 1, 5, 3, 7), (0, 3, 7, 4, 1, 6, 2, 5))
    """
    ranks = [0]
    for step in range(size.bit_length() - 1):
        ranks = [reached for rank in ranks for reached in (rank, peer(rank, step, size))]
    return tuple(ranks)


@lru_cache(maxsize=16)
def places(peer: Peer, size: int) -> tuple[int, ...]:
    """Return the place that each rank owns."""
    return tuple(sorted(range(size), key=owners(peer, size).__getitem__))


def halvings(rank: int, size: int, peer: Peer, move: Callable[[int, int, int], Move] = Move) -> Iterator[Step]:
    """Return steps in which ranks exchange halves, quarters, ... of the message until each has reduced its place.

    Args:
        rank, size: This rank, and the number of ranks.
        peer: Function that returns the peer in each step.
        move: Function that returns the message to or from a peer, given the peer, and the start and stop of a run of
            places.
    """
    place = places(peer, size)[rank]
    for step in range(size.bit_length() - 1):
        run = size >> (step + 1)
        other = peer(rank, step, size)
        mine = place // run * run
        theirs = (place ^ run) // run * run
        yield Step((move(other, theirs, theirs + run),), (move(other, mine, mine + run),), reduce=True)


def halvings_cost(numel: int, chunks: int, runs: list[int], own: int = 1) -> int:
    """Return how many elements the busiest rank sends in the halvings and in the mirrored steps that follow them.

    In the halvings, a rank sends all chunks except its own. In each mirrored step, a rank sends the chunks that it
    received in the corresponding halving. The busiest rank is the one that owns the first chunks, because these may be
    longer.

    Args:
        numel: Number of elements in the message.
        chunks: Number of chunks.
        runs: Number of chunks that each rank receives in each halving.
        own: Number of chunks that each rank owns at the end.
    """
    return numel - elements(numel, chunks, 0, own) + sum(elements(numel, chunks, 0, run) for run in runs)


def exchanges(rank: int, size: int, peer: Peer) -> Iterator[Step]:
    """Return steps in which ranks exchange everything that they have reduced so far, as one chunk."""
    for step in range(size.bit_length() - 1):
        move = (Move(peer(rank, step, size), 0, 1),)
        yield Step(move, move, reduce=True)
