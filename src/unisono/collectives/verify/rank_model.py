"""Model of one rank of a schedule: the contents of its chunks, its current step, and checks of that step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

from unisono.collectives.algorithms.step import Move, Step
from unisono.errors import CommError

__all__ = ["AlgorithmError", "Contribution", "RankModel"]


class AlgorithmError(CommError, ValueError):
    """Error in a schedule; the message names the rank, its step (counted from 1) and the chunk."""


class Contribution(NamedTuple):
    """Set of contributions that a chunk holds.

    Attributes:
        once: Bit r is set if rank r's contribution is included.
        twice: Bit r is set if rank r's contribution is included more than once.
        formula: A hash of the formula that combined them. Equal formulas give equal bits.
    """

    once: int
    twice: int
    formula: int

    def plus(self, other: Contribution) -> Contribution:
        """Return the combination of this contribution and the other, in this order."""
        again = self.twice | other.twice | (self.once & other.once)
        return Contribution(self.once | other.once, again, hash((self.formula, other.formula)))


@dataclass(slots=True, eq=False)
class RankModel:
    """Model of one rank that executes a schedule.

    Attributes:
        chunks: The contributions in each chunk.
        step: The current step; None after the last.
        number: Number of the step, from 1.
        moves: The moves of the step: "send" or "receive", and the move.
        sends, recvs: The same by peer.
        rounds: Steps on the longest chain of messages that led here.
        sent: Chunks sent so far.
    """

    rank: int
    size: int
    collective: str
    program: Iterator[Step]
    chunks: list[Contribution]
    step: Step | None = None
    number: int = 0
    moves: list[tuple[str, Move]] = field(default_factory=list)
    sends: dict[int, Move] = field(default_factory=dict)
    recvs: dict[int, Move] = field(default_factory=dict)
    rounds: int = 0
    sent: int = 0

    def error(self, message: str) -> AlgorithmError:
        """Return an error in the current step."""
        message = f"step {self.number}: {message}"
        return AlgorithmError(message, rank=self.rank, size=self.size, operation=self.collective)

    def begin(self) -> None:
        """Begin the next step, if there is one."""
        self.step = next(self.program, None)
        step = self.step or Step()
        self.moves = [("receive", move) for move in step.recv] + [("send", move) for move in step.send]
        self.sends = {move.peer: move for move in step.send}
        self.recvs = {move.peer: move for move in step.recv}
        if self.step:
            self.number += 1
            self._check_moves(step)
            self._check_chunks(step)

    def end(self, arrived: list[tuple[Move, list[Contribution]]], rounds: int) -> None:
        """Write the data received in the current step."""
        incoming: dict[int, list[tuple[int, Contribution]]] = {}
        for run, values in arrived:
            for chunk, held in enumerate(values, run.start):
                incoming.setdefault(chunk, []).append((run.peer, held))
        for chunk, terms in incoming.items():
            if self.step and self.step.reduce:
                terms.append((self.rank, self.chunks[chunk]))
            self.chunks[chunk] = reduce(Contribution.plus, (held for _, held in sorted(terms)))
        self.sent += sum(move.stop - move.start for move in self.sends.values())
        self.rounds = rounds

    def _check_moves(self, step: Step) -> None:
        # No valid schedule comes near this limit; it stops an endless one.
        if self.number > 64 * (self.size + len(self.chunks)):
            raise self.error("that is more steps than any schedule needs; does it ever end?")
        if not self.moves:
            raise self.error("nothing moves; leave the step out")
        for _, move in self.moves:
            if not 0 <= move.peer < self.size or move.peer == self.rank:
                raise self.error(f"peer {move.peer} is not another of the {self.size} ranks")
            if not 0 <= move.start < move.stop <= len(self.chunks):
                raise self.error(f"chunks {move.start} to {move.stop} are out of range for {len(self.chunks)} chunks")
        if len(self.sends) < len(step.send) or len(self.recvs) < len(step.recv):
            raise self.error(
                "two moves have the same peer and direction; a step allows one send to and one receive from each peer"
            )

    def _check_chunks(self, step: Step) -> None:
        read = {chunk for move in step.send for chunk in range(move.start, move.stop)}
        for chunk in read:
            if not self.chunks[chunk].once:
                raise self.error(f"chunk {chunk} is sent, but holds nothing yet")
        written: set[int] = set()
        for chunk in (chunk for move in step.recv for chunk in range(move.start, move.stop)):
            if step.reduce and not self.chunks[chunk].once:
                raise self.error(f"chunk {chunk} is reduced into, but holds nothing yet")
            if not step.reduce and chunk in read:
                raise self.error(f"chunk {chunk} is overwritten while it is sent")
            if not step.reduce and chunk in written:
                raise self.error(f"chunk {chunk} is overwritten by two messages")
            written.add(chunk)
