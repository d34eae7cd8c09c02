"""The library's clock: that of `time.monotonic`, unless a debugger stops it or a simulation has its own.

Every deadline and duration of the library is read here, as `clock.now()`. Python's clock is left alone, because a
program's timers, its logs and other libraries should not notice that the ranks were held.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

__all__ = ["Waitable", "go", "now", "poll_until", "real", "stop", "virtual", "wait"]

_python = time.monotonic
"""Bound here: a simulation replaces the function of the module, for programs."""

now: Callable[[], float] = _python
"""The time in seconds. Call it through the module, `clock.now()`: `stop` and `virtual` put other functions here.

A call of one microsecond reads the clock twice, and a function of Python's C takes half as long as one that looks
first whether the clock stands still.
"""

_virtual: Callable[[], float] | None = None
_stands: tuple[float, float | None] = (0.0, None)
"""The seconds for which the clock has stood still, and since when it does now. One object, so that a thread that reads
it while `go` changes it sees both or neither: the time must not run backwards."""

_ROUND = 1000
_YIELDS = 500
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3
_give_way: Callable[[], object] = getattr(os, "sched_yield", None) or partial(time.sleep, 0)


def real() -> float:
    """Return the time for threads that are in no simulation."""
    while True:
        stands = _stands
        at_s = _python() if stands[1] is None else stands[1]
        # Else the time was read before a stop and is corrected for another, or the other way round.
        if stands is _stands:
            return at_s - stands[0]


def stop() -> tuple[float, float | None]:
    """Let the clock stand still, if it does not yet; return for how long it has, and since when it does now."""
    stood_s, stopped_at = _stands
    return _stand(stood_s, _python() if stopped_at is None else stopped_at)


def go() -> tuple[float, float | None]:
    """Let the clock go on from where it stopped, if it stands; return what `stop` returns."""
    stood_s, stopped_at = _stands
    return _stand(stood_s if stopped_at is None else stood_s + _python() - stopped_at, None)


@contextmanager
def virtual(read: Callable[[], float]) -> Iterator[None]:
    """Context in which the time is what `read` returns, which calls `real` in threads outside of simulations."""
    _choose(read)
    try:
        yield
    finally:
        _choose(None)


def _stand(stood_s: float, stopped_at: float | None) -> tuple[float, float | None]:
    global _stands  # noqa: PLW0603  # the module is the clock, of which a process has one
    _stands = (stood_s, stopped_at)
    _choose(_virtual)
    return _stands


def _choose(read: Callable[[], float] | None) -> None:
    global now, _virtual  # noqa: PLW0603  # as above
    _virtual = read
    # Not only `read`: a simulation may end while other ranks of this process are held, and the other way round.
    now = read or (_python if _stands == (0.0, None) else real)


class Waitable(Protocol):
    """An event, such as `threading.Event`."""

    def wait(self, timeout: float, /) -> bool:
        """Return whether it is set, within a timeout in seconds."""


def wait(event: Waitable, deadline: float) -> bool:
    """Wait until an event is set; return False at a deadline on this clock.

    The event itself waits by the kernel's clock, which goes on while a debugger holds the rank: so its timeout only
    says when to look again.
    """
    while not event.wait(max(0.0, deadline - now())):
        if now() >= deadline:
            return False
    return True


def poll_until(
    done: Callable[[], bool], deadline: float, look: Callable[[], object] | None = None, spins: int = 500
) -> bool:
    """Poll until `done()`: first spinning, then yielding the processor, then with growing pauses (at most 1 ms).

    Args:
        done: The condition.
        deadline: On this clock; False is returned then.
        look: Called before each pause, and occasionally while spinning; may raise.
        spins: Number of polls without a pause, unless the deadline passes before.
    """
    for number in range(1, spins + 1):
        if done():
            return True
        if number % _ROUND == 0 and _is_late(deadline, look):
            return False
    for _ in range(_YIELDS):
        _give_way()
        if done():
            return True
        # If processors are oversubscribed, each yield may take milliseconds.
        if now() >= deadline:
            return False
    pause_s = _FIRST_PAUSE_S
    while not done():
        if _is_late(deadline, look):
            return False
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, _LONGEST_PAUSE_S)
    return True


def _is_late(deadline: float, look: Callable[[], object] | None) -> bool:
    if look is not None:
        look()
    return now() >= deadline
