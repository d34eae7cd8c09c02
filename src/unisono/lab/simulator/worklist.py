"""Engine for networks without shared links. It advances one rank after another, without an event queue.

The end of a step depends only on the times of the step's messages, not on the order in which the ranks are processed.
Each rank can therefore be advanced until it needs a message that has not been sent yet. This is exact and needs no
heap.
"""

# Calls to `max` would dominate the run time of the inner loop.
# ruff: noqa: FURB136

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unisono.collectives.algorithms.step import Move, Step

__all__ = ["Worklist"]

_NOBODY = -1
_GENERAL = -2


class Worklist:
    """Simulation of all ranks on a network without levels, stragglers, jitter and overhead.

    Args:
        programs: The steps of each rank.
        offsets: For each chunk, the number of bytes in all chunks before it, followed by the total.
        costs: The network's alpha, beta and gamma.
        start: Start time of each rank.

    Attributes:
        end: For each rank, the time at which its latest step ended.
        messages: Number of messages sent.
        ended: Number of ranks that have completed all their steps.
    """

    def __init__(
        self,
        programs: Sequence[Iterator[Step]],
        offsets: Sequence[int],
        costs: tuple[float, float, float],
        start: Sequence[float],
    ) -> None:
        self.programs = programs
        self.offsets = offsets
        self.costs = costs
        self.size: int = len(programs)
        self.end: list[float] = list(start)
        self.begin: list[float] = list(start)
        self.messages: int = 0
        self.ended: int = 0
        # For each rank, the peer with which it waits to exchange one message in each direction, `_GENERAL` if it is in
        # any other kind of step, or `_NOBODY`.
        self._waits = [_NOBODY] * self.size
        self._steps = [Step()] * self.size
        self._work = list(range(self.size - 1, -1, -1))
        # Messages sent but not yet received. The key is receiver * size + sender; a message is (arrival time, sender,
        # bytes).
        self._mail: dict[int, list[tuple[float, int, int]]] = {}
        self._wanted: dict[int, int] = {}
        self._inbox: list[list[tuple[float, int, int]]] = [[]] * self.size
        self._left = [0] * self.size
        self._missing = [0] * self.size

    def run(self) -> None:
        """Run all ranks to completion. Exchanges between two ranks, the common case, are computed here."""
        alpha, beta, gamma = self.costs
        programs = self.programs
        offsets = self.offsets
        end = self.end
        waits = self._waits
        steps = self._steps
        work = self._work
        exchanges = 0
        while work:
            rank = work.pop()
            for step in programs[rank]:
                send, recv, reduce = step
                if len(send) != 1 or len(recv) != 1 or send[0][0] != recv[0][0] or send[0][3]:
                    self._post(rank, step)
                    break
                peer, first, last, _ = send[0]
                if waits[peer] != rank:
                    if waits[peer] == _GENERAL and self._meets(rank, peer):
                        self._post(rank, step)
                    else:
                        waits[rank] = peer
                        steps[rank] = step
                    break
                _, other, stop, _ = steps[peer][0][0]
                mine = end[rank]
                theirs = end[peer]
                sent = offsets[last] - offsets[first]
                received = offsets[stop] - offsets[other]
                there = (mine + alpha if mine + alpha > theirs else theirs) + sent * beta
                here = (theirs + alpha if theirs + alpha > mine else mine) + received * beta
                back = here + received * gamma if reduce else here
                end[rank] = back if back > there else there
                back = there + sent * gamma if steps[peer][2] else there
                end[peer] = back if back > here else here
                waits[peer] = _NOBODY
                work.append(peer)
                exchanges += 2
            else:
                self.ended += 1
        self.messages += exchanges

    def _meets(self, rank: int, peer: int) -> bool:
        """Return whether the peer's current step waits for this rank."""
        return rank * self.size + peer in self._mail or peer * self.size + rank in self._wanted

    def _post(self, rank: int, step: Step) -> None:
        """Begin a step with any number of messages."""
        send, recv, _ = step
        self.begin[rank] = self.end[rank]
        self.messages += len(send)
        self._steps[rank] = step
        self._left[rank] = len(send) + len(recv)
        self._waits[rank] = _GENERAL
        for move in (*send, *recv):
            if self._waits[move[0]] == rank:
                self._post(move[0], self._steps[move[0]])
        complete = self._send(rank, send)
        self._inbox[rank] = box = self._received(rank, recv)
        self._missing[rank] = len(recv) - len(box)
        if recv and not self._missing[rank]:
            complete.append(rank)
        for receiver in complete:
            self._deliver(receiver)

    def _send(self, rank: int, moves: tuple[Move, ...]) -> list[int]:
        """Send messages, and return the receivers whose current steps have now received all their messages."""
        alpha, beta, _ = self.costs
        offsets = self.offsets
        start = self.end[rank]
        complete: list[int] = []
        for peer, first, last, further in moves:
            nbytes = offsets[last] - offsets[first]
            if further:
                nbytes += sum(offsets[stop] - offsets[start] for start, stop in further)
            key = peer * self.size + rank
            message = (start + alpha, rank, nbytes)
            start += nbytes * beta
            if waiting := self._wanted.pop(key, 0):
                self._inbox[peer].append(message)
                self._missing[peer] -= 1
                if waiting > 1:
                    self._wanted[key] = waiting - 1
                if not self._missing[peer]:
                    complete.append(peer)
            else:
                self._mail.setdefault(key, []).append(message)
        return complete

    def _received(self, rank: int, moves: tuple[Move, ...]) -> list[tuple[float, int, int]]:
        """Return a step's messages that have already been sent, and record that the step waits for the others."""
        box = []
        mail = self._mail
        wanted = self._wanted
        for move in moves:
            key = rank * self.size + move[0]
            if queue := mail.get(key):
                box.append(queue.pop(0))
                if not queue:
                    del mail[key]
            else:
                wanted[key] = wanted.get(key, 0) + 1
        return box

    def _deliver(self, receiver: int) -> None:
        """Deliver all messages of a receiver's step, in order of arrival."""
        _, beta, gamma = self.costs
        box = self._inbox[receiver]
        reduce = self._steps[receiver].reduce
        box.sort()
        port = reduced = self.begin[receiver]
        for arrival, sender, nbytes in box:
            port = max(arrival, port) + nbytes * beta
            if reduce:
                reduced = max(port, reduced) + nbytes * gamma
            self._ended(sender, port, 1)
        self._ended(receiver, max(port, reduced), len(box))

    def _ended(self, rank: int, time: float, messages: int) -> None:
        self.end[rank] = max(self.end[rank], time)
        self._left[rank] -= messages
        if not self._left[rank]:
            self._waits[rank] = _NOBODY
            self._work.append(rank)
