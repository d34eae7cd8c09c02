"""Watch over backward passes of several models, which wait for ever where ranks run them in different orders."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from threading import Event, Thread
from typing import Protocol

from unisono.communicator import Communicator, engine_of
from unisono.core.control import ControlPlane
from unisono.core.flight_recorder import call_site
from unisono.diagnostics.hang_report import hang_report

__all__ = ["PassWatch", "WatchedComms"]

_EVERY_S = 0.4

_watches: weakref.WeakKeyDictionary[ControlPlane, list[weakref.ref[PassWatch]]] = weakref.WeakKeyDictionary()


class WatchedComms(Protocol):
    """Communicators of one model, as `PassWatch` needs them."""

    def in_use(self) -> Sequence[Communicator]:
        """Return those that its passes use now: they are replaced after failures."""

    def abort_all(self, reason: str) -> None:
        """End all running and later passes of the model on all ranks."""


class PassWatch:
    """Observer of one model's backward passes, which finds that two ranks wait for each other in passes of two models.

    A pass waits until it runs on all ranks. If rank 0 runs the passes of models a and b, and rank 1 those of b and a,
    each waits for the other's second pass. No rank alone can see that, so while a pass runs, a thread asks all ranks
    what they are in. What it finds is certain: a rank that waits for a call that another one has not made, which waits
    likewise. It then ends the passes of the models involved, on all ranks. Where a rank has one such model, there is
    no thread.

    Args:
        kind: What averages, for the error, such as "GradientAverager".
        comms: Communicators of the model.

    Attributes:
        name: The kind, and the line that created it.
        peers: The watches of this rank, in the order of creation. A single one has nothing to watch.
        running: What ends the thread that watches the current pass, if one does.
    """

    def __init__(self, kind: str, comms: WatchedComms) -> None:
        self.name: str = f"the {kind} created at {call_site()}"
        self._comms = comms
        self.running: Event | None = None
        self.peers: list[weakref.ref[PassWatch]] = _watches.setdefault(engine_of(comms.in_use()[0]).control, [])
        self.peers.append(weakref.ref(self, self.peers.remove))

    def remove(self) -> None:
        """Watch no more. Idempotent."""
        self.stop()
        self.peers[:] = [peer for peer in self.peers if peer() is not self]

    def start(self) -> None:
        """Watch a pass that begins."""
        if self.running is None:
            self.running = Event()
            Thread(target=self._watch, args=(self.running,), name="unisono-pass-watch", daemon=True).start()

    def stop(self) -> None:
        """End the watch: the pass has ended."""
        if self.running is not None:
            self.running.set()
            self.running = None

    def _watch(self, done: Event) -> None:
        before = None
        while not done.wait(_EVERY_S):
            engine = engine_of(self._comms.in_use()[0])
            hang = hang_report(engine.control, engine.group)
            # Ranks answer one after the other; a cycle that is still there has not been two moments of a program.
            if hang.deadlock and hang.waits == before:
                self._end_passes({group for group, _ in hang.waits}, hang.report)
                return
            before = hang.waits

    def _end_passes(self, groups: set[str], report: str) -> None:
        live = [peer for ref in self.peers if (peer := ref()) is not None]
        blocked = [
            peer for peer in live if groups.intersection(engine_of(comm).group.name for comm in peer._comms.in_use())
        ]
        names = " and ".join(peer.name for peer in blocked)
        for peer in blocked:
            peer._comms.abort_all(
                f"backward passes of {names} wait for each other. Run them in the same order on all ranks, or in one "
                f"backward() of the sum of their losses{report}"
            )
