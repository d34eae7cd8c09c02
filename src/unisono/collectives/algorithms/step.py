"""Steps of a collective algorithm, described with integers only: no tensors, no waiting, no torch.

A message is cut into *chunks*, numbered from 0. For each step of a rank, an algorithm lists the messages to send and to
receive, with their peers and runs of consecutive chunks. All messages of a step are in flight at the same time; the
step ends when all have arrived. A send and the matching receive on the other rank may be in steps with different
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

__all__ = ["Cost", "Move", "Step", "elements", "in_order", "mirrored", "move_of", "others", "there_and_back", "wrapped"]


class Move(NamedTuple):
    """Message to or from another rank, with one or more runs of chunks.

    Attributes:
        peer: The other rank.
        start, stop: First chunk of the first run, and the chunk after the run.
        further: Further runs in the same message, as (start, stop) pairs in sending order.

    Example:
        >>> Move(peer=1, start=0, stop=2).runs
        ((0, 2),)
    """

    peer: int
    start: int
    stop: int
    further: tuple[tuple[int, int], ...] = ()

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """All runs of chunks, in sending order."""
        return ((self.start, self.stop), *self.further)

    @property
    def chunks(self) -> list[int]:
        """All chunk numbers, in sending order."""
        return [chunk for start, stop in self.runs for chunk in range(start, stop)]


def move_of(peer: int, chunks: Iterable[int]) -> Move:
    """Return a message with the given chunks in ascending order, in as few runs as possible.

    Args:
        peer: The other rank.
        chunks: Distinct chunk numbers; at least one.

    Example:
        >>> move_of(3, {4, 0, 1})
        Move(peer=3, start=0, stop=2, further=((4, 5),))
    """
    runs: list[tuple[int, int]] = []
    for chunk in sorted(chunks):
        if runs and runs[-1][1] == chunk:
            runs[-1] = runs[-1][0], chunk + 1
        else:
            runs.append((chunk, chunk + 1))
    (start, stop), *further = runs
    return Move(peer, start, stop, tuple(further))


def in_order(peer: int, chunks: Iterable[int]) -> Move:
    """Return a message with the given chunks in the given order, at least one, each as a run of its own."""
    (start, stop), *further = [(chunk, chunk + 1) for chunk in chunks]
    return Move(peer, start, stop, tuple(further))


def wrapped(peer: int, start: int, count: int, chunks: int) -> Move:
    """Return a message of `count` chunks, beginning with `start`; the last chunk is followed by chunk 0.

    Args:
        peer: The other rank.
        start: The first chunk, modulo `chunks`.
        count: Number of chunks, at least 1.
        chunks: Total number of chunks.

    Example:
        >>> wrapped(3, start=4, count=3, chunks=6)
        Move(peer=3, start=4, stop=6, further=((0, 1),))
    """
    start %= chunks
    if start + count <= chunks:
        return Move(peer, start, start + count)
    return Move(peer, start, chunks, ((0, start + count - chunks),))


def others(rank: int, size: int) -> tuple[list[int], list[int]]:
    """Return two orders of all other ranks: one for sending, one for receiving.

    Sending begins with the next rank, and receiving with the previous rank, so that no two ranks send to the same rank
    at once.

    Args:
        rank: This rank.
        size: Number of ranks.

    Example:
        >>> others(rank=2, size=4)
        ([3, 0, 1], [1, 0, 3])
    """
    return [(rank + way) % size for way in range(1, size)], [(rank - way) % size for way in range(1, size)]


class Step(NamedTuple):
    """Messages that one rank sends and receives concurrently.

    Attributes:
        send: Messages to send. Their data is read before any data received in this step is written.
        recv: Messages to receive. The n-th message that this step receives from a peer is the n-th message that the
            peer's matching step sends to this rank. A run that is overwritten must not overlap another received run, or
            a run that is sent in this step.
        reduce: Whether received data is reduced into the existing data instead of overwriting it. All contributions to
            a chunk, including this rank's own, are reduced in a balanced binary tree over the ranks in ascending order;
            if the number of ranks is odd, the tree's first half is longer. Every rank that reduces the same
            contributions therefore gets the same bits.

    Example:
        >>> from unisono.collectives.algorithms.all_reduce import ring
        >>> next(ring.steps(rank=0, size=2)) == Step(send=(Move(1, 1, 2),), recv=(Move(1, 0, 1),), reduce=True)
        True
    """

    send: tuple[Move, ...] = ()
    recv: tuple[Move, ...] = ()
    reduce: bool = False

    def renumbered(self, peer: Callable[[int], int], chunk: int = 0) -> Step:
        """Return this step with peers and chunks renumbered, for instance to run an algorithm on a subset of the ranks.

        Args:
            peer: Function that maps a rank in this step to its number among all ranks.
            chunk: Number that is added to each chunk's number.

        Example:
            >>> Step(send=(Move(1, 0, 2),)).renumbered(lambda rank: 10 * rank, chunk=5).send
            (Move(peer=10, start=5, stop=7, further=()),)
        """

        def moved(move: Move) -> Move:
            further = tuple((start + chunk, stop + chunk) for start, stop in move.further)
            return Move(peer(move.peer), move.start + chunk, move.stop + chunk, further)

        return Step(tuple(map(moved, self.send)), tuple(map(moved, self.recv)), self.reduce)


def mirrored(steps: Iterable[Step], *, reduce: bool = False) -> Iterator[Step]:
    """Return steps in reverse order, with sends and receives swapped.

    Mirroring turns a reduce into a broadcast, and a reduce_scatter into an all_gather; with `reduce`, it turns a
    broadcast into a reduce, and an all_gather into a reduce_scatter.

    Args:
        steps: Steps of one rank, in which each chunk travels along a tree.
        reduce: Whether the returned steps reduce received data into the existing data.

    Example:
        >>> list(mirrored([Step(send=(Move(1, 0, 1),)), Step(recv=(Move(2, 0, 1),), reduce=True)]))[0].send
        (Move(peer=2, start=0, stop=1, further=()),)
    """
    return (Step(step.recv, step.send, reduce) for step in reversed(list(steps)))


def there_and_back(steps: Iterable[Step]) -> Iterator[Step]:
    """Yield steps that reduce, then the same steps in reverse, which distribute the results.

    Example:
        >>> reducing = Step(send=(Move(peer=0, start=0, stop=1),), reduce=True)
        >>> [step.reduce for step in there_and_back([reducing])]
        [True, False]
    """
    there = list(steps)
    yield from there
    yield from mirrored(there)


class Cost(NamedTuple):
    """Exact cost of an algorithm for a number of ranks and a message size. `un.algorithms.verify` checks it.

    Attributes:
        rounds: Number of steps on the longest chain of messages that depend on each other.
        messages: Number of messages sent by the rank that sends the most messages.
        sent: Number of elements sent by the rank that sends the most elements.

    Example:
        >>> from unisono.collectives.algorithms.all_reduce import ring
        >>> ring.cost(size=4, numel=10)
        Cost(rounds=6, messages=6, sent=16)
    """

    rounds: int
    messages: int
    sent: int


def elements(numel: int, chunks: int, start: int = 0, stop: int = 1) -> int:
    """Return the number of elements in a run of chunks. Chunks are nearly equal, and longer chunks come first.

    Args:
        numel: Number of elements in the whole message.
        chunks: Number of chunks in the message.
        start, stop: The run of chunks; by default, the first chunk only.

    Example:
        >>> elements(10, 4), elements(10, 4, 3, 4), elements(10, 4, 1, 4)
        (3, 2, 7)
    """
    least, longer = divmod(numel, chunks)
    return (stop - start) * least + min(stop, longer) - min(start, longer)
