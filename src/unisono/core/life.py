"""Phases of a communicator's life."""

from __future__ import annotations

import _thread
from enum import Enum
from typing import Literal

from unisono.core.failure import Cause

__all__ = ["TRANSITIONS", "Event", "Life", "Phase"]


class Phase(Enum):
    """Determines what happens to a communicator's next call."""

    OPEN = "the call runs"
    HELD = "the call waits until a debugger releases the ranks"
    BROKEN = "the call raises the group's first cause of failure"
    CLOSING = "the call raises ClosedError; calls in flight complete, or raise a failure of the group"
    CLOSED = "the call raises ClosedError; calls in flight, if any, have been aborted"
    RETIRED = "the call raises ClosedError, as do calls in flight: another communicator has replaced this one"


Event = Literal["hold", "go", "fail", "close", "drain", "retire"]
"""What changes the phase; see `Life`."""

TRANSITIONS: dict[Event, dict[Phase, Phase]] = {
    "hold": {Phase.OPEN: Phase.HELD},
    "go": {Phase.HELD: Phase.OPEN},
    "fail": {Phase.OPEN: Phase.BROKEN, Phase.HELD: Phase.BROKEN, Phase.CLOSING: Phase.CLOSED},
    "close": {Phase.OPEN: Phase.CLOSING, Phase.HELD: Phase.CLOSING, Phase.BROKEN: Phase.CLOSED},
    "drain": {Phase.CLOSING: Phase.CLOSED},
    "retire": dict.fromkeys((Phase.OPEN, Phase.HELD, Phase.BROKEN), Phase.RETIRED),
}
"""For each event, the next phase by current phase; see `Life`."""

_CLOSED = frozenset({Phase.CLOSING, Phase.CLOSED, Phase.RETIRED})


class Life:
    """A communicator's phase, set only by `change`. The table shows the next phase; an empty cell means no change:

    =======  =====  ====  ======  =======  ======  =======
    phase    hold   go    fail    close    drain   retire
    =======  =====  ====  ======  =======  ======  =======
    OPEN     HELD         BROKEN  CLOSING          RETIRED
    HELD            OPEN  BROKEN  CLOSING          RETIRED
    BROKEN                        CLOSED           RETIRED
    CLOSING               CLOSED           CLOSED
    CLOSED
    RETIRED
    =======  =====  ====  ======  =======  ======  =======

    The events: "hold" and "go": a debugger holds and releases the ranks; "fail": the group has failed; "close": the
    program closes the communicator; "drain": all calls made before `close` have ended, so a failure has nothing to
    abort; "retire": `rebuild` has created another communicator.

    Attributes:
        phase: The current phase.
        closed: Whether this rank has closed the communicator, or another communicator has replaced it.
        cause: The group's first failure; None until a failure changes the phase.
    """

    def __init__(self) -> None:
        self.phase: Phase = Phase.OPEN
        self.closed: bool = False
        self.cause: Cause | None = None
        # The phase is changed by the program's threads, by the library's threads that report failures, and by the
        # thread that holds or releases the ranks for a debugger. A lock from `_thread` also works in simulations, which
        # replace the locks of `threading`; this one is reentrant, because a signal handler may interrupt `change`.
        self._lock = _thread.RLock()

    def change(self, event: Event, cause: Cause | None = None) -> bool:
        """Apply an event; return whether the phase has changed. Pass `cause` only with "fail"."""
        with self._lock:
            then = TRANSITIONS[event].get(self.phase)
            if then is not None:
                # Set the cause first, because a call that finds the phase broken raises the cause.
                self.cause = self.cause or cause
                self.phase = then
                self.closed = then in _CLOSED
            return then is not None

    def fail_after_fork(self, cause: Cause) -> None:
        """Apply "fail" in a forked child; `cause` replaces any cause that the parent had."""
        # Another thread of the parent may have held the old lock; nothing in the child would ever release it.
        self._lock = _thread.RLock()
        self.cause = cause
        self.change("fail")
