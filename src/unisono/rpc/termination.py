"""Termination of agents: together, when all want to end and no call is in flight anywhere.

The lowest living rank decides. A rank that wants to end and has nothing to do reports how many calls it has sent to
each rank, and served for each (`IDLE`). When all have, and sent equals served, the deciding rank queries all once
more (`CONFIRM`); if nothing has changed since, nothing was in flight in between, and it sends `CLOSE` to all. Ranks
that are gone do not count. After Mattern, *Algorithms for distributed termination detection* (1987).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from unisono.core.transport import Mailbox
from unisono.core.types import Timeout
from unisono.core.work import resolve_timeout
from unisono.errors import CommError, CommTimeoutError
from unisono.rpc.channel import control_message
from unisono.rpc.protocol import CLOSE, CONFIRM, IDLE

__all__ = ["TerminationDetector"]

_Report = tuple[list[int], list[int]]
_SEND_S = 0.5
_SHORTEST_S, _LONGEST_S = 0.01, 0.2


class TerminationDetector:
    """One rank's part in termination.

    Args:
        box: Mailbox of this rank.
        alive: Returns the ranks that still serve calls.
        counts: Returns the numbers of calls sent to and served for each rank; None while a call is in progress.

    Attributes:
        over: Whether all agreed to end.
    """

    def __init__(self, box: Mailbox, alive: Callable[[], list[int]], counts: Callable[[], _Report | None]) -> None:
        self._box, self._rank, self._alive, self._counts = box, box.group.rank, alive, counts
        self._lock = threading.Lock()
        self._requested = False
        self._ended = threading.Event()
        self.over = False
        self._wave = 0
        self._last_report: tuple[int, int, _Report] | None = None
        self._reports: dict[int, dict[int, _Report]] = {}

    def wait(self, timeout: Timeout | None) -> None:
        """Wait until all ranks are done. Raises CommTimeoutError if that takes too long; all then continue."""
        self._requested = True
        self._query_ranks()
        limit_s = None if timeout is None else resolve_timeout(timeout)
        limit = None if limit_s is None else time.monotonic() + limit_s
        pause = _SHORTEST_S
        while not self._ended.wait(pause if limit is None else min(pause, max(limit - time.monotonic(), 0))):
            # Polled periodically, not after each call: a rank that only serves waits here all the time.
            pause = _SHORTEST_S if self.look() else min(2 * pause, _LONGEST_S)
            if limit is not None and time.monotonic() >= limit:
                self._requested = False
                raise CommTimeoutError(
                    f"waited {limit_s:.1f} s in rpc.shutdown for all ranks to finish their calls"
                    f"{self._missing()}. Did every rank call shutdown?",
                    waited_s=limit_s,
                )

    def _missing(self) -> str:
        """Describe the ranks that have not reported that they are done, as far as this rank knows."""
        rank, alive = self._rank, self._alive()
        if self._counts() is None:
            return "; calls of this rank, or of others to it, are still running"
        if rank != min(alive):
            return f", and rank {min(alive)}, which decides, has not reported that they have"
        with self._lock:
            reports = self._reports.get(self._wave, {})
        late = [str(other) for other in alive if other not in reports]
        return f"; no report yet from rank {', '.join(late)}" if late else ""

    def _query_ranks(self) -> None:
        """Query all ranks if this rank, which wants to end, is the deciding one."""
        rank, alive = self._rank, self._alive()
        if rank == min(alive):
            with self._lock:
                self._wave += 1
                self._reports.clear()
                wave = self._wave
            for other in alive:
                if other != rank:
                    self._send(other, CONFIRM, wave)
        self.look()

    def finish(self) -> None:
        """Wake the waiting threads: the agent is closed."""
        self._ended.set()

    def look(self) -> bool:
        """Report that this rank is idle, if it is; return whether the report was new."""
        report = self._counts() if self._requested and not self._ended.is_set() else None
        if report is None:
            return False
        coordinator = min(self._alive())
        with self._lock:
            wave = self._wave
            new, self._last_report = (coordinator, wave, report) != self._last_report, (coordinator, wave, report)
        if coordinator == self._rank:
            self._record(coordinator, wave, report)
        elif new:
            self._send(coordinator, IDLE, wave, *report)
        return new

    def arrived(self, peer: int, kind: int, words: tuple[Any, ...]) -> None:
        """Handle a termination message."""
        if kind == IDLE:
            self._record(peer, words[0], (words[1], words[2]))
        elif kind == CONFIRM:
            with self._lock:
                self._wave = max(self._wave, words[0])
                self._last_report = None
            self.look()
        elif kind == CLOSE:
            self.over = True
            self._ended.set()

    def _record(self, peer: int, wave: int, report: _Report) -> None:
        """Handle a report, as the deciding rank."""
        rank, alive = self._rank, self._alive()
        with self._lock:
            verdict, wave = self._judged(peer, wave, report, alive)
        if verdict == CONFIRM:
            for other in [peer] if wave < 0 else alive:
                if other != rank:
                    self._send(other, CONFIRM, abs(wave))
            self.look()
        elif verdict == CLOSE:
            for other in alive:
                if other != rank:
                    self._send(other, CLOSE)
            self.arrived(rank, CLOSE, ())

    def _judged(self, peer: int, wave: int, report: _Report, alive: list[int]) -> tuple[int | None, int]:
        """Return the action: nothing, close, or query all; a negative wave queries only this rank, which is behind."""
        if wave < self._wave:
            return CONFIRM, -self._wave
        self._wave = wave
        self._reports.setdefault(wave, {})[peer] = report
        now, before = self._reports[wave], self._reports.get(wave - 1)
        if any(other not in now for other in alive) or not _even(now, alive):
            return None, wave
        if before is not None and all(before.get(other) == now[other] for other in alive):
            return CLOSE, wave
        self._wave += 1
        self._reports = {wave: now}
        return CONFIRM, self._wave

    def _send(self, peer: int, kind: int, *words: Any) -> None:
        try:
            self._box.send(peer, control_message(kind, words), (), _SEND_S)
        except CommError:
            # The peer is gone, or about to be declared so: then another rank decides, or the peer does not count.
            return


def _even(reports: dict[int, _Report], alive: list[int]) -> bool:
    """Return whether every call between these ranks was served."""
    return all(reports[a][0][b] == reports[b][1][a] for a in alive for b in alive)
