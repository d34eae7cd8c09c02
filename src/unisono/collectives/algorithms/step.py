"""Interface of a collective algorithm: a sequence of steps in integers. No tensors, no waiting, no torch.

A message is cut into *chunks*, numbered from 0. A schedule lists for one rank, step by step, the
runs of chunks to send and to receive, and their peers. All messages of a step are in flight at the
same time; the step ends when all have arrived. Peers' steps need not have the same number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

__all__ = ["Algorithm", "Cost", "Move", "Step"]


@dataclass(frozen=True, slots=True)
class Move:
    """Message of a run of chunks to or from another rank.

    Attributes:
        peer: The rank that receives or sends it.
        start, stop: The run's first chunk, and the chunk after its last.

    Example:
        >>> Move(peer=1, start=0, stop=2)
        Move(peer=1, start=0, stop=2)
    """

    peer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Step:
    """Messages that one rank sends and receives concurrently.

    Attributes:
        send: At most one message to each peer. Read before any received data of this step is written.
        recv: At most one message from each peer. Runs that are overwritten overlap neither a run that is
            sent in this step nor another received run.
        reduce: Whether received data is reduced into the present data, or overwrites it. Contributions
            to one chunk are reduced in rank order, this rank's own included, so that every
            rank that reduces the same contributions gets the same bits.

    Example:
        >>> from unisono.collectives.algorithms.all_reduce import ring
        >>> next(ring.steps(rank=0, size=2)) == Step(send=(Move(1, 1, 2),), recv=(Move(1, 0, 1),), reduce=True)
        True
    """

    send: tuple[Move, ...] = ()
    recv: tuple[Move, ...] = ()
    reduce: bool = False


@dataclass(frozen=True, slots=True)
class Cost:
    """Declared cost of a schedule; the prover checks it by counting.

    Attributes:
        rounds: Steps on the longest chain of messages that wait for each other.
        sent: Bytes sent by the rank that sends most, in units of the whole message (all chunks of
            one rank's input, or of its output where that is larger).

    Example:
        >>> from unisono.collectives.algorithms.all_reduce import ring
        >>> ring.cost(4) == Cost(rounds=6, sent=Fraction(3, 2))
        True
    """

    rounds: int
    sent: Fraction


class Algorithm(Protocol):
    """Interface of a file of `algorithms/<collective>/`. Rooted collectives are written for root 0.

    The interpreter renumbers ranks for other roots. For all_reduce, reduce and broadcast, a file may also define
    `chunks(size)`, the number of chunks that a message is cut into; `chunks_of` has the defaults. For all_to_all, each
    rank sends chunks 0 to p-1 and receives chunks p to 2p-1.

    Example:
        >>> ring: Algorithm = un.algorithms.ALGORITHMS["all_gather"]["ring"]
        >>> [step.send for step in ring.steps(rank=0, size=3)]
        [(Move(peer=1, start=0, stop=1),), (Move(peer=1, start=2, stop=3),)]
        >>> ring.cost(3)
        Cost(rounds=2, sent=Fraction(2, 3))
    """

    def steps(self, rank: int, size: int) -> Iterator[Step]:
        """Return a rank's steps, in order.

        Args:
            rank: A rank of the group; the root is rank 0.
            size: Number of ranks, from 1.
        """
        ...

    def cost(self, size: int) -> Cost:
        """Return the cost among `size` ranks, which must equal the cost that the prover counts.

        Args:
            size: As for `steps`.
        """
        ...
