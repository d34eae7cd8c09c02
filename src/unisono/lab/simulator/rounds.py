"""Engine for algorithms whose ranks behave identically up to rotation: numpy simulates a round on all ranks at once.

The algorithm's steps are evaluated once, with a symbolic rank. For each distance a, one array has the times of the
messages from every rank to rank + a. Rotating an array by its distance a takes two slices, because rank + a wraps
around.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from unisono.collectives.algorithms.step import Move, Step
from unisono.lab.simulator.network import Network, exponentials

__all__ = ["Rotation", "Rounds"]

_Array = npt.NDArray[np.float64]


class _ChunkRun(NamedTuple):
    """For each rank r, the chunks b + first to b + last - 1, where b = ((r + shift) mod size) * scale."""

    shift: int
    scale: int
    first: int
    last: int


class _ShiftedSend(NamedTuple):
    shift: int
    runs: list[_ChunkRun]


class Rounds:
    """Simulation of all ranks at once, on a network without overhead.

    Shared links are modelled exactly only if one rank at a time uses each link, as in a ring; with shared links, any
    other algorithm is rejected.

    Args:
        offsets: For each chunk, the number of bytes in all chunks before it, followed by the total.
        network: The network.
        start: Start time of each rank.
        messages: Number of messages that all ranks have sent in earlier collectives.

    Attributes:
        end: For each rank, the time at which its latest step ended.
        messages: Number of messages sent so far.
    """

    def __init__(self, offsets: Sequence[int], network: Network, start: Sequence[float], messages: int = 0) -> None:
        self.size: int = len(start)
        self.network = network
        self._offsets = np.array(offsets)
        self.end: _Array = np.array(start, dtype=float)
        self.messages: int = messages
        self._tables: dict[tuple[int, int, int, float], _Array] = {}
        self._neighbours = set[int]()
        self._buffers = np.empty(self.size), np.empty(self.size)
        self._factors = np.array([network.stragglers.get(rank, 1.0) for rank in range(self.size)])
        self._plain = not (network.stragglers or network.jitter or network.levels)
        self._costs: dict[int, _Array] = {}

    def run(self, steps: Iterator[Step]) -> None:
        """Run all ranks to completion.

        Args:
            steps: The algorithm's steps for a symbolic rank, a `Rotation`.

        Raises:
            TypeError: The ranks' steps are not rotations of each other.
        """
        for step in steps:
            sends = [_ShiftedSend(self._shift(move), [_run(*run) for run in move.runs]) for move in step.send]
            if sorted(-send.shift % self.size for send in sends) != sorted(map(self._shift, step.recv)):
                raise TypeError("sends and receives of a step do not match")
            if self.network.shared:
                self._check_links(sends)
            if self._plain and len(sends) == 1:
                self._exchange(sends[0], step.reduce)
            else:
                self._exchange_many(sends, step.reduce)
            self.messages += self.size * len(sends)

    def _check_links(self, sends: list[_ShiftedSend]) -> None:
        """Allow only one message per rank and step, to neighbours in one direction, so that no ranks share a link."""
        self._neighbours.update(send.shift for send in sends)
        if len(sends) > 1 or len(self._neighbours) > 1 or not self._neighbours <= {1, self.size - 1}:
            raise TypeError("ranks may use a shared link at the same time")

    def _shift(self, move: Move) -> int:
        peer: object = move.peer
        if not isinstance(peer, Rotation) or (peer.scale, peer.offset) != (1, 0):
            raise TypeError("a peer is no rotation of the rank")
        return peer.shift

    def _bytes(self, runs: list[_ChunkRun], shift: int, factor: float) -> _Array:
        """Return, for each rank, the size in bytes of its message from rank + shift, times a factor."""
        parts = []
        for run in runs:
            key = (run.scale, run.first, run.last, factor)
            if key not in self._tables:
                base = np.arange(self.size) * run.scale
                lengths = (self._offsets[base + run.last] - self._offsets[base + run.first]) * factor
                # Concatenate two copies, so that every rotation is a slice.
                self._tables[key] = np.concatenate([lengths, lengths])
            first = (run.shift + shift) % self.size
            parts.append(self._tables[key][first : first + self.size])
        return parts[0] if len(parts) == 1 else np.sum(parts, axis=0)

    def _exchange(self, send: _ShiftedSend, reduce: bool) -> None:
        """Compute a step in which each rank sends one message and receives one."""
        begin = self.end
        delivered, reduced = self._buffers
        alpha = self.network.alpha
        gamma = self.network.gamma
        back = -send.shift % self.size
        for into, source in self._slices(back):
            np.add(begin[source], alpha, out=delivered[into])
        np.maximum(delivered, begin, out=delivered)
        delivered += self._bytes(send.runs, back, 1 / self.network.bandwidth)
        if reduce and gamma:
            np.add(delivered, self._bytes(send.runs, back, gamma), out=reduced)
        else:
            reduced = delivered
        for into, source in self._slices(send.shift):
            np.maximum(reduced[into], delivered[source], out=begin[into])

    def _paths(self, shift: int) -> _Array:
        """Return rows with the `alpha`, `beta` and largest beta of the links of each rank's path to rank + shift."""
        if shift not in self._costs:
            paths = [self.network.path(rank, (rank + shift) % self.size) for rank in range(self.size)]
            slowest = [max((beta for _, beta in (*path.out, *path.into)), default=0.0) for path in paths]
            self._costs[shift] = np.array([[path.alpha for path in paths], [path.beta for path in paths], slowest])
        return self._costs[shift]

    def _slices(self, shift: int) -> list[tuple[slice, slice]]:
        """Return pairs of slices (ranks, shifted ranks) that map each rank to (rank + shift) mod size."""
        cut = self.size - shift
        return [(slice(0, cut), slice(shift, None)), *([(slice(cut, None), slice(0, shift))] if shift else [])]

    def _exchange_many(self, sends: list[_ShiftedSend], reduce: bool) -> None:
        """Compute a step with any number of messages. A receiver's port serves its messages in order of arrival."""
        network = self.network
        begin = self.end
        factors = self._factors
        ranks = np.arange(self.size)
        start = self.end.copy()
        flights = list[tuple[npt.NDArray[Any], ...]]()
        for number, send in enumerate(sends, self.messages // self.size):
            alpha, beta, slowest = self._paths(send.shift)
            latency = alpha * factors
            if network.jitter:
                latency += network.jitter * exponentials(network.seed, self.size, number)
            nbytes = self._bytes(send.runs, 0, 1.0)
            back = -send.shift % self.size
            wire = nbytes * beta * factors
            head = start + latency
            here = (head, head + np.maximum(wire, nbytes * slowest), nbytes, beta)
            flights.append((*(np.roll(values, -back) for values in here), (ranks + back) % self.size))
            start += wire
        heads, tails, lengths, betas, senders = (np.stack(values) for values in zip(*flights, strict=True))
        order = np.lexsort((senders, heads), axis=0)
        delivered = np.empty_like(heads)
        port = begin
        reduced = begin
        for turn in order:
            nbytes = lengths[turn, ranks]
            port = np.maximum(heads[turn, ranks], port) + nbytes * betas[turn, ranks] * factors
            delivered[turn, ranks] = done = np.maximum(port, tails[turn, ranks])
            reduced = np.maximum(done, reduced)
            if reduce:
                reduced = reduced + nbytes * network.gamma * factors
        ends = [np.roll(done, -send.shift) for send, done in zip(sends, delivered, strict=True)]
        self.end = np.maximum.reduce([reduced, *delivered, *ends])


def _run(start: object, stop: object) -> _ChunkRun:
    if isinstance(start, int) and isinstance(stop, int):
        return _ChunkRun(0, 0, start, stop)
    if not isinstance(start, Rotation) or not isinstance(stop, Rotation):
        raise TypeError("a run begins or ends at the same chunk on all ranks")
    if (start.shift, start.scale) != (stop.shift, stop.scale):
        raise TypeError("a run wraps around on some ranks")
    return _ChunkRun(start.shift, start.scale, start.offset, stop.offset)


@dataclass(slots=True, eq=False)
class Rotation:
    """Symbolic rank r of a group, or a number computed from r: ((r + shift) mod size) * scale + offset.

    You can add integers to a `Rotation`, multiply it by a positive integer, and take its remainder modulo size * scale;
    the result is another `Rotation`. Any other operation, such as a comparison, raises TypeError, because its result
    is not a rotation of the rank.

    Args:
        size: Number of ranks.
        shift, scale, offset: Integers in ((r + shift) mod size) * scale + offset.

    Example:
        >>> (Rotation(8) - 3) % 8
        Rotation(size=8, shift=5, scale=1, offset=0)
        >>> Rotation(8) ^ 1
        Traceback (most recent call last):
        ...
        TypeError: unsupported operand type(s) for ^: 'Rotation' and 'int'
    """

    __hash__: ClassVar[None] = None  # type: ignore[assignment]
    size: int
    shift: int = 0
    scale: int = 1
    offset: int = 0

    def __add__(self, other: int) -> Rotation:
        if not isinstance(other, int):
            return NotImplemented
        return Rotation(self.size, self.shift, self.scale, self.offset + other)

    __radd__ = __add__

    def __sub__(self, other: int) -> Rotation:
        return self + -other if isinstance(other, int) else NotImplemented

    def __mul__(self, other: int) -> Rotation:
        if not isinstance(other, int) or other < 1:
            return NotImplemented
        return Rotation(self.size, self.shift, self.scale * other, self.offset * other)

    __rmul__ = __mul__

    def __mod__(self, other: int) -> Rotation:
        if other != self.size * self.scale:
            return NotImplemented
        whole, offset = divmod(self.offset, self.scale)
        return Rotation(self.size, (self.shift + whole) % self.size, self.scale, offset)

    def __eq__(self, other: object) -> Any:
        raise TypeError("a symbolic rank cannot be compared")

    def __bool__(self) -> bool:
        raise TypeError("a symbolic rank is neither true nor false")
