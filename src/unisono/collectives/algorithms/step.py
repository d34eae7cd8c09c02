"""What a collective algorithm is: a sequence of steps in integers. No tensors, no waiting, no torch.

A message is cut into *chunks*, numbered from 0. A schedule tells one rank, step by step, which
runs of chunks go to whom and which come from whom. All messages of a step are under way at the
same time; the step is over when all have arrived. Peers' steps need not have the same number.
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
    """What one rank sends and receives at one time.

    Attributes:
        send: At most one to each peer. Read before anything that this step receives is written.
        recv: At most one from each peer. Runs that are overwritten overlap neither a run that is
            sent in this step nor another that is received.
        reduce: Whether what arrives is reduced into what is there, or overwrites it. Contributions
            to one chunk are taken in the order of ranks, this rank's own included, so that every
            rank that reduces the same contributions gets the same bits.
    """

    send: tuple[Move, ...] = ()
    recv: tuple[Move, ...] = ()
    reduce: bool = False


@dataclass(frozen=True, slots=True)
class Cost:
    """What a schedule claims; the prover counts it.

    Attributes:
        rounds: Steps on the longest chain of messages that wait for each other.
        sent: Bytes sent by the rank that sends most, in units of the whole message (all chunks of
            one rank's input, or of its output where that is larger).
    """

    rounds: int
    sent: Fraction


class Algorithm(Protocol):
    """A file of `algorithms/<collective>/`. Rooted collectives are written for root 0.

    The interpreter renumbers ranks for other roots. `chunks` may be left out where it is one a
    rank; for `all_to_all`, chunks 0 to p-1 are what this rank gives, p to 2p-1 what it gets.
    """

    def steps(self, rank: int, size: int) -> Iterator[Step]:
        """What this rank does, in order."""
        ...

    def cost(self, size: int) -> Cost:
        """Rounds and bytes among `size` ranks."""
        ...
