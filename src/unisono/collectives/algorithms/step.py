"""Steps of a collective algorithm, in integers: no tensors, no waiting, no torch.

A message is cut into *chunks*, numbered from 0. An algorithm lists, for one rank, step by step, the runs of chunks to
send and to receive, and the peers. All messages of a step are in flight at the same time; the step ends when all have
arrived. Matching steps on two peers may have different numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

__all__ = ["Cost", "Move", "Step", "elements", "mirrored", "move_of", "others", "wrapped"]


class Move(NamedTuple):
    """Message to or from another rank, with one or more runs of chunks.

    Attributes:
        peer: The rank that receives or sends it.
        start, stop: The first run: its first chunk, and the chunk after its last.
        further: Further runs, as (start, stop) pairs, sent in this order in the same message.

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
        """All runs, in order."""
        return ((self.start, self.stop), *self.further)

    @property
    def chunks(self) -> list[int]:
        """All chunks, in order."""
        return [chunk for start, stop in self.runs for chunk in range(start, stop)]


def move_of(peer: int, chunks: Iterable[int]) -> Move:
    """Return a message with the given chunks in ascending order, in as few runs as possible.

    Args:
        peer: The rank that receives or sends it.
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


def wrapped(peer: int, start: int, count: int, chunks: int) -> Move:
    """Return the message of `count` chunks from `start` on, wrapping to chunk 0 after the last one.

    Args:
        peer: The rank that receives or sends it.
        start: The first chunk; taken modulo `chunks`.
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
    """Return all other ranks in the order in which a rank sends to them, and in the order in which it receives.

    Each order begins with a neighbour, so that no two ranks send to the same rank at once.

    Args:
        rank: The rank that sends and receives.
        size: Number of ranks.

    Example:
        >>> others(rank=2, size=4)
        ([3, 0, 1], [1, 0, 3])
    """
    return [(rank + way) % size for way in range(1, size)], [(rank - way) % size for way in range(1, size)]


class Step(NamedTuple):
    """Messages that one rank sends and receives concurrently.

    Attributes:
        send: Messages to send. They are read before any received data of this step is written.
        recv: Messages to receive. The n-th message from a peer in a step is the n-th that the peer sends to this
            rank in its matching step. Runs that are overwritten must not overlap a run that is sent in this step, or
            another received run.
        reduce: Whether received data is reduced into the existing data rather than overwriting it. Contributions to one
            chunk, including this rank's own, are reduced in a balanced binary tree over the ranks in ascending order
            (the first half is the longer one), so every rank that reduces the same contributions gets the same bits.

    Example:
        >>> from unisono.collectives.algorithms.all_reduce import ring
        >>> next(ring.steps(rank=0, size=2)) == Step(send=(Move(1, 1, 2),), recv=(Move(1, 0, 1),), reduce=True)
        True
    """

    send: tuple[Move, ...] = ()
    recv: tuple[Move, ...] = ()
    reduce: bool = False

    def renumbered(self, peer: Callable[[int], int], chunk: int = 0) -> Step:
        """Return this step, which is among some of the ranks, as a step among all ranks.

        Args:
            peer: Function that returns a rank's number among all ranks.
            chunk: First chunk of its part of the message.

        Example:
            >>> Step(send=(Move(1, 0, 2),)).renumbered(lambda rank: 10 * rank, chunk=5).send
            (Move(peer=10, start=5, stop=7, further=()),)
        """

        def moved(move: Move) -> Move:
            further = tuple((start + chunk, stop + chunk) for start, stop in move.further)
            return Move(peer(move.peer), move.start + chunk, move.stop + chunk, further)

        return Step(tuple(map(moved, self.send)), tuple(map(moved, self.recv)), self.reduce)


def mirrored(steps: Iterable[Step], *, reduce: bool = False) -> Iterator[Step]:
    """Return steps in reverse, with sends and receives exchanged.

    Turns a reduce into a broadcast and a reduce_scatter into an all_gather, or, with `reduce`, vice versa.

    Args:
        steps: Steps of one rank, in which each chunk travels along a tree.
        reduce: Whether received data is reduced into the existing data.

    Example:
        >>> list(mirrored([Step(send=(Move(1, 0, 1),)), Step(recv=(Move(2, 0, 1),), reduce=True)]))[0].send
        (Move(peer=2, start=0, stop=1, further=()),)
    """
    return (Step(step.recv, step.send, reduce) for step in reversed(list(steps)))


class Cost(NamedTuple):
    """Exact cost of an algorithm for a group and message size, as declared by its file and counted by the prover.

    Attributes:
        rounds: Number of steps on the longest chain of messages that depend on each other.
        messages: Messages sent by the rank that sends the most of them.
        sent: Elements sent by the rank that sends the most of them.

    Example:
        >>> from unisono.collectives.algorithms.all_reduce import ring
        >>> ring.cost(size=4, numel=10)
        Cost(rounds=6, messages=6, sent=16)
    """

    rounds: int
    messages: int
    sent: int


def elements(numel: int, chunks: int, start: int = 0, stop: int = 1) -> int:
    """Return the number of elements in a run of nearly equal chunks. If they differ, the first ones are longer.

    Args:
        numel: Number of elements in the whole message.
        chunks: Number of chunks in the message.
        start, stop: The run; the first chunk by default.

    Example:
        >>> elements(10, 4), elements(10, 4, 3, 4), elements(10, 4, 1, 4)
        (3, 2, 7)
    """
    least, longer = divmod(numel, chunks)
    return (stop - start) * least + min(stop, longer) - min(start, longer)
