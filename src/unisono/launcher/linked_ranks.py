"""Ranks that are connected to the process that started them, to report their outcome and to receive commands."""

from __future__ import annotations

from abc import abstractmethod
from contextvars import ContextVar
from multiprocessing.connection import Connection, wait
from typing import Any

from unisono.control.client import SocketControl
from unisono.core.closing import Closing
from unisono.launcher.job import reported
from unisono.launcher.supervisor import Outcome, Supervisor, lost

__all__ = ["LINK", "LinkedRanks", "own_link", "received"]

LINK: ContextVar[Connection[Any, Any]] = ContextVar("unisono link")


def own_link() -> Connection[Any, Any]:
    """Return this rank's connection, for a program that receives commands from the process that started it.

    Programs call `own_link` instead of using `LINK`: when a program is pickled by value, so are all objects that the
    program refers to, and a `ContextVar` cannot be pickled.
    """
    return LINK.get()


def received(rank: int, link: Connection[Any, Any]) -> Outcome | None:
    """Return the outcome that a rank sends; None if the rank ends without sending one."""
    try:
        return reported(rank, link.recv_bytes())
    except (EOFError, OSError):
        return None


class LinkedRanks(Closing):
    """A job's ranks on this host, as seen by the process that starts them; `close` ends the ranks.

    Args:
        size: Number of ranks.
        on_failure: As for `launch`.

    Attributes:
        size, on_failure: As given.
        links: Connection to each rank.
        running: The ranks whose next outcome is awaited.
        control: The ranks' control plane; None if lost ranks are not replaced.
    """

    control: SocketControl | None = None

    def __init__(self, size: int, on_failure: str) -> None:
        self.size = size
        self.on_failure = on_failure
        self.links: dict[int, Connection[Any, Any]] = {}
        self.running: set[int] = set()

    def run(self) -> list[Outcome]:
        """Return the outcomes of the job, in the order in which its ranks ended."""
        return Supervisor(self.start, self.ends, range(self.size), self.on_failure, self.control).run()

    @abstractmethod
    def start(self, rank: int, attempt: int) -> None:
        """Start a rank. If the rank had a process before, the new process replaces it."""

    @abstractmethod
    def how(self, rank: int) -> str:
        """Return a description of how a rank that did not report has ended."""

    def signs(self, rank: int) -> list[Any]:
        """Return waitable objects, one of which becomes ready when the rank reports or ends."""
        return [self.links[rank]]

    def ends(self, limit_s: float | None) -> list[Outcome]:
        """Wait until a rank reports or ends, or for `limit_s` seconds (None for no limit); return the outcomes."""
        signs = {rank: self.signs(rank) for rank in self.running}
        ready = wait([sign for each in signs.values() for sign in each], limit_s)
        over = [rank for rank, each in signs.items() if not {*each}.isdisjoint(ready)]
        self.running.difference_update(over)
        return [self._outcome(rank) for rank in over]

    def _outcome(self, rank: int) -> Outcome:
        # Poll first: children of a dead rank may still hold its end of the connection open, so receiving could block.
        outcome = received(rank, self.links[rank]) if self.links[rank].poll() else None
        return outcome or lost(rank, self.size, self.how(rank))
