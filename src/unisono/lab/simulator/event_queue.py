"""Simulation engine for any network: events run in time order, because shared links serve messages in that order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unisono.collectives.algorithms.step import Move, Step
from unisono.lab.simulator.network import Network, Path, exponential

__all__ = ["EventQueue", "Message"]


class Message(NamedTuple):
    """Message of a simulated collective or of a `Replay`.

    Provisional: it may change in any minor version, without a deprecation.

    Attributes:
        sender, receiver: Ranks that send and receive the message; in a `Replay`, their positions in `Replay.ranks`.
        runs: Runs of consecutive chunks, as (start, stop) pairs in the sender's numbering. Empty if the chunks are
            unknown, as in a recorded run.
        nbytes: Message size in bytes.
        start_s, end_s: Times at which the message begins to leave the sender and at which it is delivered; in a
            `Replay`, in the unit `Replay.unit`.
        reduce: Whether the receiver reduces the message into its data rather than overwriting the data.
        step: Number of the sender's step that sends the message, from 1.
        call: Description of the recorded call that the message belongs to; may be empty.

    Example:
        >>> un.algorithms.simulate("broadcast", "binomial", size=2, nbytes=8, record=True).record[0].runs
        ((0, 1),)
    """

    sender: int
    receiver: int
    runs: tuple[tuple[int, int], ...]
    nbytes: int
    start_s: float
    end_s: float
    reduce: bool
    step: int
    call: str = ""


_IDLE = Step()


@dataclass(slots=True, eq=False)
class _Flight:
    """Message in flight, with the times at which its first and last byte reach the next link or port."""

    sender: int
    receiver: int
    move: Move
    nbytes: int
    start: float
    head: float
    tail: float
    latency: float
    path: Path
    step: int
    hop: int = 0


@dataclass(slots=True, eq=False)
class _RankState:
    """State of a rank; `ends` is the latest known end time of its current step."""

    program: Iterator[Step | float]
    ends: float
    step: Step = _IDLE
    number: int = 0
    sent: int = 0
    left: int = 0
    port: float = 0.0
    reduced: float = 0.0
    next_send: float = 0.0
    next_recv: float = 0.0
    done: bool = False


class EventQueue:
    """Simulation of all ranks on any network.

    Args:
        programs: The steps of each rank; a float before a step is the earliest time at which that step may begin.
        offsets: For each chunk, the number of bytes in all chunks before it, followed by the total.
        network: The network.
        start: Start time of each rank.
        recording: Whether to keep all messages in `record`.
    """

    def __init__(
        self,
        programs: Sequence[Iterator[Step | float]],
        offsets: Sequence[int],
        network: Network,
        start: Sequence[float],
        recording: bool = False,
    ) -> None:
        self.network = network
        self.offsets = offsets
        self.size: int = len(programs)
        self._recording = recording
        self.record: list[Message] = []
        self.ranks: list[_RankState] = [
            _RankState(program, time) for program, time in zip(programs, start, strict=True)
        ]
        self._events: list[tuple[float, int, int, _Flight | None]] = []
        self._pushed = 0
        self._free = dict[int, float]()
        self._mail: dict[int, list[_Flight]] = {}
        self._wanted: dict[int, int] = {}
        for rank, time in enumerate(start):
            self._push(time, rank, None)

    def run(self) -> None:
        """Run all ranks to completion."""
        while self._events:
            _, rank, _, flight = heapq.heappop(self._events)
            if flight is None:
                self._begin(rank)
            elif flight.hop > len(flight.path.out) + len(flight.path.into):
                self._arrive(flight)
            else:
                self._pass_link(flight)

    def _push(self, time: float, rank: int, flight: _Flight | None) -> None:
        self._pushed += 1
        heapq.heappush(self._events, (time, rank, self._pushed, flight))

    def _factor(self, rank: int) -> float:
        return self.network.stragglers.get(rank, 1.0)

    def _begin(self, rank: int) -> None:
        state = self.ranks[rank]
        step = next(state.program, None)
        if step is None:
            state.done = True
        elif not isinstance(step, Step):
            state.ends = max(state.ends, step)
            self._push(state.ends, rank, None)
        else:
            state.step = step
            state.number = state.number + 1
            state.port = state.reduced = state.ends
            waits = self.network.overhead is None
            state.left = len(step.recv) + waits * len(step.send)
            for move in step.send:
                self._send(rank, state, move)
            self._receive_early(rank, step)
            if not step.recv and not waits:
                self._push(state.ends, rank, None)

    def _receive_early(self, rank: int, step: Step) -> None:
        """Deliver the step's messages that have already arrived, and record that the step waits for the rest."""
        early = []
        for move in step.recv:
            key = rank * self.size + move.peer
            if queue := self._mail.get(key):
                early.append(queue.pop(0))
                if not queue:
                    del self._mail[key]
            else:
                self._wanted[key] = self._wanted.get(key, 0) + 1
        for flight in sorted(early, key=lambda flight: (self._arrival(flight), flight.sender)):
            self._deliver(flight)

    def _send(self, rank: int, state: _RankState, move: Move) -> None:
        network = self.network
        factor = self._factor(rank)
        nbytes = sum(self.offsets[stop] - self.offsets[start] for start, stop in move.runs)
        path = network.path(rank, move.peer)
        delay = network.jitter and network.jitter * exponential(network.seed, rank, state.sent)
        state.sent += 1
        if network.overhead is None:
            # The port sends one message at a time. `next_send` is the time at which the port has sent the last byte of
            # the step's previous message.
            start = max(state.next_send, state.port)
            head = start
            tail = start + nbytes * path.beta * factor
            state.next_send = tail
        else:
            start = max(state.ends, state.next_send)
            state.ends = head = start + network.overhead * factor
            last = max(nbytes - 1, 0) * path.beta * factor
            state.next_send = start + network.gap * factor + last
            tail = head + last
        latency = path.alpha * factor + delay
        flight = _Flight(rank, move.peer, move, nbytes, start, head, tail, latency, path, state.number)
        if path.out:
            self._push(head, rank, flight)
        else:
            self._pass_link(flight)

    def _pass_link(self, flight: _Flight) -> None:
        """Advance a message by one hop. The latency is added between the outgoing and the incoming links."""
        out = flight.path.out
        into = flight.path.into
        if flight.hop == len(out):
            flight.head += flight.latency
            flight.tail += flight.latency
        else:
            link, beta = out[flight.hop] if flight.hop < len(out) else into[flight.hop - len(out) - 1]
            flight.head = max(flight.head, self._free.get(link, 0.0))
            self._free[link] = flight.head + flight.nbytes * beta
            flight.tail = max(flight.tail, self._free[link])
        flight.hop += 1
        arrived = flight.hop > len(out) + len(into)
        self._push(self._arrival(flight) if arrived else flight.head, flight.sender, flight)

    def _arrival(self, flight: _Flight) -> float:
        return flight.head if self.network.overhead is None else flight.tail

    def _arrive(self, flight: _Flight) -> None:
        key = flight.receiver * self.size + flight.sender
        if waiting := self._wanted.pop(key, 0):
            if waiting > 1:
                self._wanted[key] = waiting - 1
            self._deliver(flight)
        else:
            self._mail.setdefault(key, []).append(flight)

    def _deliver(self, flight: _Flight) -> None:
        state = self.ranks[flight.receiver]
        network = self.network
        factor = self._factor(flight.receiver)
        reduction = flight.nbytes * network.gamma * factor if state.step.reduce else 0.0
        if network.overhead is None:
            state.port = max(flight.head, state.port) + flight.nbytes * flight.path.beta * factor
            end = max(state.port, flight.tail)
            if reduction:
                state.reduced = max(end, state.reduced) + reduction
            self._ended(flight.sender, end)
            self._ended(flight.receiver, max(end, state.reduced))
        else:
            start = max(flight.tail, state.ends, state.next_recv)
            end = start + network.overhead * factor
            gap = network.gap + max(flight.nbytes - 1, 0) * flight.path.beta
            state.next_recv = start + gap * factor
            self._ended(flight.receiver, end + reduction)
        if self._recording:
            self.record.append(
                Message(
                    flight.sender,
                    flight.receiver,
                    flight.move.runs,
                    flight.nbytes,
                    flight.start,
                    end,
                    state.step.reduce,
                    flight.step,
                )
            )

    def _ended(self, rank: int, time: float) -> None:
        state = self.ranks[rank]
        state.ends = max(state.ends, time)
        state.left -= 1
        if not state.left:
            self._push(state.ends, rank, None)
