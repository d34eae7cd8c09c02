"""Phases of a communicator's life."""

from __future__ import annotations

import _thread
from enum import Enum

__all__ = ["Event", "Life", "Phase"]


class Phase(Enum):
    """Determines what happens to a communicator's next call."""

    OPEN = "open"
    """The call runs."""
    HELD = "held"
    """The call waits until a debugger releases the ranks."""
    BROKEN = "broken"
    """The call raises the group's first cause of failure."""
    CLOSED = "closed"
    """The call raises `ClosedError`. Calls that were started earlier still complete."""
    RETIRED = "retired"
    """The call raises `ClosedError`, as do calls started earlier: another communicator has replaced this one."""


class Event(Enum):
    """Event that changes the phase."""

    HOLD = "hold"
    GO = "go"
    FAIL = "fail"
    CLOSE = "close"
    RETIRE = "retire"


_ENDS = {Event.FAIL: Phase.BROKEN, Event.CLOSE: Phase.CLOSED, Event.RETIRE: Phase.RETIRED}
_NEXT = {
    Phase.OPEN: {Event.HOLD: Phase.HELD, **_ENDS},
    Phase.HELD: {Event.GO: Phase.OPEN, **_ENDS},
    Phase.BROKEN: {Event.CLOSE: Phase.CLOSED, Event.RETIRE: Phase.RETIRED},
    Phase.CLOSED: {},
    Phase.RETIRED: {},
}


class Life:
    """The phase of a communicator, changed only by `change`. Events without an entry leave it unchanged:

    | phase | hold | go | fail | close | retire |
    |---|---|---|---|---|---|
    | open | held | | broken | closed | retired |
    | held | | open | broken | closed | retired |
    | broken | | | | closed | retired |
    | closed | | | | | |
    | retired | | | | | |

    Args:
        phase: The initial phase.

    Attributes:
        phase: The current phase.
    """

    def __init__(self, phase: Phase = Phase.OPEN) -> None:
        self.phase: Phase = phase
        # Three threads change the phase: the program's thread, the control plane's thread after a failure, and the
        # thread that holds the ranks. Use `_thread.RLock`, which simulations do not patch. The lock is reentrant,
        # because a signal handler may interrupt `change`.
        self._lock = _thread.RLock()

    def change(self, event: Event) -> bool:
        """Apply an event; return whether the phase has changed."""
        with self._lock:
            then = _NEXT[self.phase].get(event)
            if then is not None:
                self.phase = then
            return then is not None
