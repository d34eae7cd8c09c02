"""Model of one rank that runs an algorithm: the contents of its chunks, its current step, and checks of that step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from unisono.collectives.algorithms.algorithm import balanced
from unisono.collectives.algorithms.step import Move, Step
from unisono.errors import CommError

__all__ = ["NOTHING", "AlgorithmError", "ChunkState", "RankModel", "ReductionTrees", "named", "ranks_text"]


class AlgorithmError(CommError, ValueError):
    """Error in an algorithm. The message names the rank, its step (counted from 1) and the chunk.

    Example:
        >>> from types import SimpleNamespace
        >>> idle = SimpleNamespace(steps=lambda rank, size: iter(()))
        >>> un.algorithms.verify("all_gather", idle, size=2)
        Traceback (most recent call last):
        ...
        unisono.collectives.verify.rank_model.AlgorithmError: ... chunk 1 lacks the contribution of rank 1; it was...
    """


class ChunkState(NamedTuple):
    """Set of contributions that a chunk contains.

    Attributes:
        members: Bit mask in which bit r is set if the chunk contains contribution r.
        tree: Number of the reduction tree that combined the contributions.
    """

    members: int
    tree: int


NOTHING = ChunkState(0, -1)
"""Contents of an unwritten chunk."""


@dataclass(slots=True, eq=False)
class RankModel:
    """Model of one rank that runs an algorithm.

    Attributes:
        chunks: The contributions in each chunk.
        written: For each received chunk, the step and peer of the last message that wrote it.
        step: The current step; None after the last step.
        number: Number of the current step, from 1.
        sends, recvs: Messages of the current step, by peer and by position among that peer's messages.
        rounds: Number of steps on the longest chain of messages so far.
        messages: Number of messages sent so far.
        sent: For each chunk, how many times it was sent.
        landing: Largest number of chunks that a step received for reduction; these chunks need separate memory.
    """

    rank: int
    size: int
    collective: str
    program: Iterator[Step]
    chunks: list[ChunkState]
    trees: ReductionTrees
    written: dict[int, tuple[int, int]] = field(default_factory=dict)
    step: Step | None = None
    number: int = 0
    sends: dict[tuple[int, int], Move] = field(default_factory=dict)
    recvs: dict[tuple[int, int], Move] = field(default_factory=dict)
    rounds: int = 0
    messages: int = 0
    sent: Counter[int] = field(default_factory=Counter)
    landing: int = 0

    def error(self, message: str) -> AlgorithmError:
        """Return an error about the current step."""
        message = f"step {self.number}: {message}"
        return AlgorithmError(message, rank=self.rank, size=self.size, operation=self.collective)

    def begin(self) -> None:
        """Begin the next step if there is one, and check it."""
        self.step = next(self.program, None)
        self.sends = {}
        self.recvs = {}
        if self.step:
            self.number += 1
            self._check_tuples(self.step)
            self._check_moves(self.step)
            self._check_chunks(self.step)
            self.sends = _numbered(self.step.send)
            self.recvs = _numbered(self.step.recv)

    def end(self, arrived: list[tuple[Move, list[ChunkState]]], rounds: int) -> None:
        """End the current step: store the received data."""
        assert self.step is not None
        incoming: dict[int, list[tuple[int, ChunkState]]] = {}
        for move, values in arrived:
            for chunk, held in zip(move.chunks, values, strict=True):
                incoming.setdefault(chunk, []).append((move.peer, held))
                self.written[chunk] = self.number, move.peer
        for chunk, parts in incoming.items():
            self.chunks[chunk] = self._reduced(chunk, parts) if self.step.reduce else parts[-1][1]
        for move in self.step.send:
            self.sent.update(move.chunks)
        self.messages += len(self.step.send)
        self.rounds = rounds
        if self.step.reduce:
            self.landing = max(self.landing, sum(len(move.chunks) for move, _ in arrived))

    def _reduced(self, chunk: int, arrived: list[tuple[int, ChunkState]]) -> ChunkState:
        """Combine a chunk's contents with the contributions received for it, in rank order."""
        seen = self.chunks[chunk].members
        for peer, held in arrived:
            # In a barrier, it does no harm if a contribution arrives several times.
            if self.collective != "barrier" and seen & held.members:
                again = ranks_text(seen & held.members)
                raise self.error(f"chunk {chunk} from rank {peer} adds the contribution of {again} a second time")
            seen |= held.members
        parts = sorted([(self.rank, self.chunks[chunk]), *arrived])
        return ChunkState(seen, balanced([held.tree for _, held in parts], self.trees.plus))

    def _check_tuples(self, step: Step) -> None:
        for name, moves in (("send", step.send), ("recv", step.recv)):
            if not all(isinstance(move, Move) for move in moves):
                raise self.error(f"{name}={moves!r} is not a tuple of moves; write {name}=(Move(...),), with the comma")

    def _check_moves(self, step: Step) -> None:
        # Stop an algorithm that never ends. No valid algorithm comes near this number of steps.
        if self.number > 64 * (self.size + len(self.chunks)):
            raise self.error("that is more steps than any algorithm needs; does it ever end?")
        if not step.send and not step.recv:
            raise self.error("nothing moves; leave the step out")
        for move in (*step.send, *step.recv):
            if not 0 <= move.peer < self.size or move.peer == self.rank:
                raise self.error(f"peer {move.peer} is not another of the {self.size} ranks")
            for start, stop in move.runs:
                if not 0 <= start < stop <= len(self.chunks):
                    raise self.error(f"chunks {start} to {stop} are out of range for {len(self.chunks)} chunks")
            ordered = sorted(move.runs)
            for (_, stop), (start, _) in pairwise(ordered):
                if start < stop:
                    raise self.error(f"chunk {start} is twice in one message")

    def _check_chunks(self, step: Step) -> None:
        read = {chunk for move in step.send for chunk in move.chunks}
        for chunk in read:
            if not self.chunks[chunk].members:
                raise self.error(f"chunk {chunk} is sent, but holds nothing yet")
        written: set[int] = set()
        for chunk in (chunk for move in step.recv for chunk in move.chunks):
            if step.reduce and not self.chunks[chunk].members:
                raise self.error(f"chunk {chunk} is reduced into, but holds nothing yet")
            if not step.reduce and chunk in read:
                raise self.error(f"chunk {chunk} is overwritten while it is sent")
            if not step.reduce and chunk in written:
                raise self.error(f"chunk {chunk} is overwritten by two messages")
            written.add(chunk)
        if step.reduce:
            self._check_reduced_runs({run for move in step.recv for run in move.runs})

    def _check_reduced_runs(self, runs: set[tuple[int, int]]) -> None:
        for (start, stop), (other, end) in pairwise(sorted(runs)):
            if other < stop:
                raise self.error(f"chunks {start} to {stop} and {other} to {end} overlap; cut reduced runs alike")


def _numbered(moves: tuple[Move, ...]) -> dict[tuple[int, int], Move]:
    found: dict[tuple[int, int], Move] = {}
    for move in moves:
        number = 0
        while (move.peer, number) in found:
            number += 1
        found[move.peer, number] = move
    return found


def named(move: Move) -> str:
    """Return a message's chunks as text."""
    runs = [str(start) if stop == start + 1 else f"{start} to {stop - 1}" for start, stop in move.runs]
    return f"{'chunk' if len(move.chunks) == 1 else 'chunks'} {', '.join(runs)}"


def ranks_text(members: int) -> str:
    """Return a set of contributions as text, such as "rank 1" or "ranks 1, 3"."""
    numbers = [str(rank) for rank in range(members.bit_length()) if members >> rank & 1]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers)}"


class ReductionTrees:
    """Registry that numbers reduction trees. Equal trees have equal numbers, and give equal bits.

    The order of operands matters, because the sum of two NaNs has the bits of the first.

    Example:
        >>> trees = ReductionTrees()
        >>> trees.plus(trees.leaf(1), trees.leaf(0)) == trees.plus(trees.leaf(0), trees.leaf(1))
        False
    """

    def __init__(self) -> None:
        # In the order of the numbers.
        self._nodes: dict[tuple[int, int], int] = {}

    def leaf(self, contribution: int) -> int:
        """Return the number of the tree that consists of a single contribution."""
        return self._number((-1, contribution))

    def plus(self, some: int, other: int) -> int:
        """Return the number of the tree that adds two trees, in this order."""
        return self._number((some, other))

    def _number(self, node: tuple[int, int]) -> int:
        return self._nodes.setdefault(node, len(self._nodes))

    def text(self, number: int) -> str:
        """Return a tree as text, such as "((0+1)+2)"."""
        nodes = list(self._nodes)

        def text_of(number: int) -> str:
            low, high = nodes[number]
            return str(high) if low < 0 else f"({text_of(low)}+{text_of(high)})"

        return text_of(number)
