"""Detects deadlocks between several models' backward passes, which occur if ranks run them in different orders."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread
from typing import Protocol

from unisono.communicator import Communicator, engine_of
from unisono.core.control import ControlPlane
from unisono.core.flight_recorder import call_site
from unisono.diagnostics.hang_report import hang_report
from unisono.errors import CommError

__all__ = ["PassWatch", "WatchedComms"]

_EVERY_S = 0.4

_watches: weakref.WeakKeyDictionary[ControlPlane, list[weakref.ref[PassWatch]]] = weakref.WeakKeyDictionary()


class WatchedComms(Protocol):
    """Interface through which `PassWatch` accesses one model's communicators.

    Attributes:
        base: A communicator of the model's ranks that failures leave in place; those in use are recreated from it.
    """

    base: Communicator

    def aborts(self) -> dict[str, Callable[[str], None]]:
        """Return the groups in which a rank may wait for others, by name, each with a function that aborts it."""


class PassWatch:
    """Watches one model's backward passes, and detects deadlocks between ranks that wait in different models' passes.

    A backward pass waits until all ranks run it, and so does a forward pass that communicates. If rank 0 runs the
    backward passes of model a and then b, but rank 1 runs b and then a, each rank waits for the other's second backward
    pass. Ranks also deadlock if rank 1 fails in b and then restarts its training step with a, while rank 0 waits in b.
    No rank can detect a deadlock alone, so a thread queries the activities of all ranks during each backward pass. If
    ranks form a cycle in which each rank waits for a call that the next rank has not made, they are deadlocked. The
    thread then aborts the calls in the cycle on all ranks. The backward passes raise errors, and the models renew their
    communicators in the next backward pass, as after any failure. Ranks that wait to renew a model's communicators may
    be part of a cycle too. Ranks wait for a renewal in a `RepeatableBarrier`, so aborting this wait does not make the
    model unusable. A rank with only one watched model needs no thread.

    Args:
        kind: Name of the averaging class, such as "GradientAverager", for error messages.
        comms: The model's communicators.

    Attributes:
        name: Kind of the averaging object, and the line that created it.
        peers: The `PassWatch` of each of this rank's models, including this one, in order of creation. A rank's only
            `PassWatch` does nothing.
        running: Event that stops the thread that watches the current backward pass; None if there is no thread.
        on_pass: Function called with the ID of a graph task that reached another model of this rank first.
        errors: Counter that grows whenever a forward or backward pass of one of this rank's models raises an error.
    """

    on_pass: Callable[[int], None]

    def __init__(self, kind: str, comms: WatchedComms) -> None:
        self.name: str = f"the {kind} created at {call_site()}"
        self._comms = comms
        self.running: Event | None = None
        self.errors: int = 0
        self.peers: list[weakref.ref[PassWatch]] = _watches.setdefault(engine_of(comms.base).control, [])
        self.peers.append(weakref.ref(self, self.peers.remove))

    def remove(self) -> None:
        """Stop watching permanently. Idempotent."""
        self.stop()
        # Find and remove this watch in one step, because another thread may append a watch meanwhile, and a garbage
        # collection may remove one.
        with suppress(ValueError):
            self.peers.remove(weakref.ref(self))

    def announce(self, number: int) -> None:
        """Notify the other models of this rank that a graph task has reached this model first."""
        if len(self.peers) == 1:
            return
        for peer in self._live():
            if peer is not self:
                peer.on_pass(number)

    def raised(self) -> None:
        """Increment `errors` for all models of this rank, because a forward or backward pass has raised an error."""
        for peer in self._live():
            peer.errors += 1

    def start(self) -> None:
        """Start watching a backward pass, if this rank has other models."""
        if self.running is None and len(self.peers) > 1:
            self.running = Event()
            Thread(target=self._watch, args=(self.running,), name="unisono-pass-watch", daemon=True).start()

    def stop(self) -> None:
        """Stop watching, because the backward pass has ended."""
        if self.running is not None:
            self.running.set()
            self.running = None

    def _live(self) -> list[PassWatch]:
        # Copy the list: if a garbage collection removed a watch during the loop, the loop would skip the next one.
        return [peer for ref in list(self.peers) if (peer := ref()) is not None]

    def _watch(self, done: Event) -> None:
        before = None
        while not done.wait(_EVERY_S):
            # Use the original communicator, because the communicator in use may already be closed for replacement.
            engine = engine_of(self._comms.base)
            hang = hang_report(engine.control, engine.group)
            # Ranks answer a query at different times, so one report may show a cycle that never existed. A cycle that
            # is the same in two reports is real.
            if hang.deadlock and hang.waits == before:
                self._end_passes({group for group, _ in hang.waits}, hang.report)
                return
            before = hang.waits

    def _end_passes(self, groups: set[str], report: str) -> None:
        aborts = [(peer, name, abort) for peer in self._live() for name, abort in peer._comms.aborts().items()]
        found = [(peer, abort) for peer, name, abort in aborts if name in groups]
        names = " and ".join(peer.name for peer in dict.fromkeys(peer for peer, _ in found))
        for _, abort in found:
            # Ignore the loss of the control plane, of which the other ranks have already been notified.
            with suppress(CommError):
                abort(
                    f"backward passes of {names} wait for each other. Run them in the same order on all ranks, or in "
                    f"one backward() of the sum of their losses; after an error, repeat the step on all ranks{report}"
                )
