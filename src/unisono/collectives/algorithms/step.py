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
    """Chunks `start` up to, not including, `stop`, to or from `peer`."""

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
    """

    rounds: int
    sent: Fraction


class Algorithm(Protocol):
    """Interface of a file of `algorithms/<collective>/`. Rooted collectives are written for root 0.

    The interpreter renumbers ranks for other roots. `chunks` may be omitted where there is one per
    rank; for `all_to_all`, this rank sends chunks 0 to p-1 and receives chunks p to 2p-1.
    """

    def steps(self, rank: int, size: int) -> Iterator[Step]:
        """Return this rank's steps, in order."""
        ...

    def cost(self, size: int) -> Cost:
        """Rounds and bytes among `size` ranks."""
        ...
