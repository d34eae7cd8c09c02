"""Watches backward passes of several models, which wait forever if ranks run them in different orders."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
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
    """Interface of one model's communicators for `PassWatch`."""

    def in_use(self) -> Sequence[Communicator]:
        """Return the communicators that the model's passes currently use, which are replaced after failures."""

    def every(self) -> Sequence[Communicator]:
        """Return these, and those from which they are recreated."""


class PassWatch:
    """Observer of one model's backward passes that detects two ranks waiting for each other in passes of two models.

    A pass waits until it runs on all ranks, and so does a forward that communicates. If rank 0 runs the passes of
    models a and b, and rank 1 those of b and a, each waits for the other's second pass. The same happens if rank 1
    fails in b and restarts its step with a. A single rank cannot see that, so meanwhile a thread queries all ranks'
    activities. A cycle of ranks that each wait for a call that the next rank has not made is certain to be a deadlock.
    The thread then aborts these calls on all ranks, so their passes raise, and models renew their communicators in the
    next pass, as after any failure. A rank with only one such model needs no thread.

    Args:
        kind: Name of the averaging class, such as "GradientAverager", for the error.
        comms: The model's communicators.

    Attributes:
        name: The kind, and the line where it was created.
        peers: This rank's watches, in order of creation. A single watch has nothing to do.
        running: Event that ends the thread watching the current pass, if any.
        on_pass: Called with the number of a graph task that has reached another model of this rank first.
    """

    on_pass: Callable[[int], None]

    def __init__(self, kind: str, comms: WatchedComms) -> None:
        self.name: str = f"the {kind} created at {call_site()}"
        self._comms = comms
        self.running: Event | None = None
        self.peers: list[weakref.ref[PassWatch]] = _watches.setdefault(engine_of(comms.in_use()[0]).control, [])
        self.peers.append(weakref.ref(self, self.peers.remove))

    def remove(self) -> None:
        """Stop watching for good. Idempotent."""
        self.stop()
        self.peers[:] = [peer for peer in self.peers if peer() is not self]

    def announce(self, number: int) -> None:
        """Let the other models of this rank know that a graph task has reached this one first."""
        for ref in self.peers:
            peer = ref()
            if peer is not None and peer is not self:
                peer.on_pass(number)

    def start(self) -> None:
        """Watch a pass that begins, if there are other models."""
        if self.running is None and len(self.peers) > 1:
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
            # The original communicator, because the one in use may have been closed, to be replaced.
            engine = engine_of(self._comms.every()[0])
            hang = hang_report(engine.control, engine.group)
            # Ranks answer at different times; a cycle that still exists cannot be an artifact of inconsistent
            # snapshots.
            if hang.deadlock and hang.waits == before:
                self._end_passes({group for group, _ in hang.waits}, hang.report)
                return
            before = hang.waits

    def _end_passes(self, groups: set[str], report: str) -> None:
        live = [peer for ref in self.peers if (peer := ref()) is not None]
        found = {peer: [c for c in peer._comms.every() if engine_of(c).group.name in groups] for peer in live}
        names = " and ".join(peer.name for peer, comms in found.items() if comms)
        for comm in (comm for comms in found.values() for comm in comms):
            # If the control plane is gone, it has notified the other ranks already.
            with suppress(CommError):
                comm.abort(
                    f"backward passes of {names} wait for each other. Run them in the same order on all ranks, or in "
                    f"one backward() of the sum of their losses; after an error, repeat the step on all ranks{report}"
                )
