"""What is left to do when a communicator ends: because it is closed, or because nobody holds it any more."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence

from unisono.control.process_exit import close_at_exit
from unisono.core.control import ControlPlane
from unisono.core.failure import to_cause
from unisono.core.threads import SerialWorker, spawn_thread
from unisono.core.transport import Transport
from unisono.errors import CommError
from unisono.simulation import here

__all__ = ["CLOSE_S", "Teardown"]

CLOSE_S = 1.0
"""How long the end of a communicator waits for the other ranks to leave too."""
_AT_EXIT_S = 5.0


class Teardown:
    """All that a communicator has to let go of. It knows nothing of the communicator, and so outlives it.

    A whole that nobody holds any more is closed in the background, as by `close`. A part waits for its whole: what it
    has sent may still be on its way, and the others may not be through. It is let go of when all its ranks have
    dropped it, which they tell each other when they make the next part; at the latest at the end of the whole.

    Args:
        transport: To be closed.
        control: Where the group is to be left.
        helper: The thread that is to end.
        timeout_s: Seconds within which the helper is through.

    Attributes:
        closers: What else is to be done at the end.
        over: Whether it is done.
        dropped: Whether nobody holds the communicator any more, and it was not closed.
    """

    def __init__(self, transport: Transport, control: ControlPlane, helper: SerialWorker, timeout_s: float) -> None:
        self._transport, self._control, self._helper, self._timeout_s = transport, control, helper, timeout_s
        self.group = transport.group
        self.closers: list[Callable[[], None]] = []
        self.over = self.dropped = False
        self._is_part = False
        self._parts: list[Teardown] = []
        self._settled = threading.Event()
        self._process = os.getpid()
        # Simulated threads end with the simulation, which must not depend on when memory is given back.
        self._simulated = here() is not None
        if not self._simulated:
            close_at_exit(self)

    def close(self, patience: float) -> None:
        """Leave, and let go; waits a little for the others to leave too."""
        self.over = True
        if os.getpid() != self._process:
            # All of it is the parent's, which goes on.
            return
        self._helper.end()
        self._helper.join(self._timeout_s)
        # The control plane may have gone first; then there is nobody left to tell.
        with contextlib.suppress(CommError):
            self._transport.leave()
            # Whoever waits for this rank is told at once; but what it has sent is not cut off before all have left.
            self._control.leave(self.group, patience)
        self._transport.close()

    def finish(self) -> None:
        """What comes after `close`: the parts that nobody has closed, and what the makers want done."""
        if os.getpid() != self._process:
            return
        for part in self.left():
            part.close(0.0)
            part.finish()
        for closer in self.closers:
            closer()

    # -- parts ---------------------------------------------------------------------------------
    def adopt(self, part: Teardown) -> None:
        """This one is to be let go of with the whole, if not before."""
        part._is_part = True
        self._parts = [*self.left(), part]

    def inherit(self, other: Teardown) -> None:
        """Do what another one would have done, too."""
        self.closers, other.closers = other.closers, []
        self._parts, other._parts = other.left(), []

    def left(self) -> list[Teardown]:
        """The parts that nobody has closed."""
        return [part for part in self._parts if not part.over]

    def dropped_parts(self) -> list[str]:
        """The names of those that nobody holds any more."""
        return [part.group.name for part in self.left() if part.dropped]

    def release(self, told: Sequence[Sequence[str]]) -> None:
        """Let go of the parts that all their ranks have dropped, by what each rank has told."""
        members = self.group.members
        for part in self.left():
            ranks = [members.index(member) for member in part.group.members if member in members]
            if len(ranks) == part.group.size and all(part.group.name in told[rank] for rank in ranks):
                part.close(0.0)
                part.finish()

    def fail(self, error: BaseException) -> None:
        """Tell the ranks of dropped parts, some of which may wait for this one, why it does not come."""
        for part in self.left():
            if part.dropped:
                with contextlib.suppress(CommError):
                    self._control.fail(part.group, to_cause(error, part.group.rank, "the program"))

    # -- nobody holds it -----------------------------------------------------------------------
    def drop(self) -> None:
        """Of a finalizer, so that it takes no lock: that of the control plane may be held by this very thread."""
        if self._simulated or os.getpid() != self._process:
            return
        self.dropped = True
        self._helper.end()
        if not self._is_part:
            spawn_thread(self._settle, f"unisono end of {self.group.name}")

    def _settle(self) -> None:
        try:
            self.close(CLOSE_S)
            self.finish()
        finally:
            self._settled.set()

    def on_process_exit(self, error: BaseException | None) -> None:
        """The process ends: what is under way here comes first, and whoever waits for this rank is told."""
        if os.getpid() != self._process:
            return
        if self.dropped and not self._is_part:
            self._settled.wait(_AT_EXIT_S)
        elif error is None and not self.over:
            self._transport.leave()
