"""Butterflies for powers of two: in each step, every rank exchanges data with one peer.

Chunks are placed so that every message of a reduction is one run: whatever the peers, the ranks that are still
reachable after a step own adjacent places.
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
"""Function that returns a rank's peer in a step (from 0) among a number of ranks."""


def doubling(rank: int, step: int, size: int) -> int:
    """Return the peer at distance 1, 2, 4, ..., whose rank differs in one bit."""
    return rank ^ 1 << step


def swinging(rank: int, step: int, size: int) -> int:
    """Return the peer at distance 1, -1, 3, -5, 11, ..., the sums of powers of -2; odd ranks use the opposite sign.

    Example:
        >>> [swinging(0, step, 16) for step in range(4)]
        [1, 15, 3, 11]
    """
    distance: int = (1 - (-2) ** (step + 1)) // 3
    return (rank + (-distance if rank % 2 else distance)) % size


def needs_power_of_two(size: int) -> str:
    """Return the reason why an algorithm cannot serve a number of ranks; empty if it is a power of two."""
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
    """Return the steps in which ranks exchange halves, quarters, ... until each has reduced its place.

    Args:
        rank, size: As for the algorithm.
        peer: Peer in each step.
        move: Function that returns the message to or from a peer, given the first place and the one after the last.
    """
    place = places(peer, size)[rank]
    for step in range(size.bit_length() - 1):
        run = size >> (step + 1)
        other = peer(rank, step, size)
        mine = place // run * run
        theirs = (place ^ run) // run * run
        yield Step((move(other, theirs, theirs + run),), (move(other, mine, mine + run),), reduce=True)


def halvings_cost(numel: int, chunks: int, runs: list[int], own: int = 1) -> int:
    """Return how many elements the busiest rank sends in halvings of a message, and in the same steps in reverse.

    In the halvings, it sends all chunks except its own; in reverse, it sends back those that it received. The rank with
    the first chunks, which are longer, sends the most.

    Args:
        numel: Number of elements in the message.
        chunks: Number of chunks.
        runs: Number of chunks that it receives in each halving.
        own: Number of its own chunks.
    """
    return numel - elements(numel, chunks, 0, own) + sum(elements(numel, chunks, 0, run) for run in runs)


def exchanges(rank: int, size: int, peer: Peer) -> Iterator[Step]:
    """Return the steps in which ranks exchange everything that they have reduced so far, as one chunk."""
    for step in range(size.bit_length() - 1):
        move = (Move(peer(rank, step, size), 0, 1),)
        yield Step(move, move, reduce=True)
