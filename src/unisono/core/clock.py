"""The library's clock: `time.monotonic`, unless a debugger stops it or a simulation replaces it.

The library measures every deadline and duration with `clock.now()`. Python's own clock is unaffected, because timers,
logs and other libraries should not notice that ranks were held.
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
"""The real `time.monotonic`, saved here because a simulation replaces it for programs."""

now: Callable[[], float] = _python
"""The time in seconds. Call it through the module, `clock.now()`, because `stop` and `virtual` replace it.

It is a C function, because a one-microsecond collective reads the clock twice, and a Python function that first checks
whether the clock is stopped would take twice as long.
"""

_virtual: Callable[[], float] | None = None
_stands: tuple[float, float | None] = (0.0, None)
"""The seconds for which the clock was stopped, and when the current stop began.

Both values are in one tuple, so that a thread never sees one value from before a change and the other from after it.
Otherwise, time would run backwards.
"""

_ROUND = 1000
_YIELDS = 500
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3
_give_way: Callable[[], object] = getattr(os, "sched_yield", None) or partial(time.sleep, 0)


def real() -> float:
    """Return the real time, which threads outside simulations use."""
    while True:
        stands = _stands
        at_s = _python() if stands[1] is None else stands[1]
        # Retry if the clock was stopped or resumed between the two reads, because `stands` and `at_s` then do not
        # match.
        if stands is _stands:
            return at_s - stands[0]


def stop() -> tuple[float, float | None]:
    """Stop the clock if it is running. Return the total duration of earlier stops, and the start time of this one."""
    stood_s, stopped_at = _stands
    return _stand(stood_s, _python() if stopped_at is None else stopped_at)


def go() -> tuple[float, float | None]:
    """Resume a stopped clock at the time at which it stopped. Return the total duration of all stops, and None."""
    stood_s, stopped_at = _stands
    return _stand(stood_s if stopped_at is None else stood_s + _python() - stopped_at, None)


@contextmanager
def virtual(read: Callable[[], float]) -> Iterator[None]:
    """Return a context in which `read` supplies the time; in threads outside simulations, `read` should call `real`."""
    _choose(read)
    try:
        yield
    finally:
        _choose(None)


def _stand(stood_s: float, stopped_at: float | None) -> tuple[float, float | None]:
    global _stands  # noqa: PLW0603  # the module is the process's only clock
    _stands = (stood_s, stopped_at)
    _choose(_virtual)
    return _stands


def _choose(read: Callable[[], float] | None) -> None:
    global now, _virtual  # noqa: PLW0603  # as above
    _virtual = read
    # Check both states: a simulation may end while the clock is stopped, and the clock may resume during a simulation.
    now = read or (_python if _stands == (0.0, None) else real)


class Waitable(Protocol):
    """An event, such as `threading.Event`."""

    def wait(self, timeout: float, /) -> bool:
        """Wait up to `timeout` seconds; return whether the event is set."""


def wait(event: Waitable, deadline: float) -> bool:
    """Wait until an event is set; return False once a deadline on this clock passes.

    The event's own timeout follows the kernel's clock, which keeps running while a debugger holds the rank. When the
    event's timeout expires, the library's clock decides whether the deadline has passed.
    """
    while not event.wait(max(0.0, deadline - now())):
        if now() >= deadline:
            return False
    return True


def poll_until(
    done: Callable[[], bool], deadline: float, look: Callable[[], object] | None = None, spins: int = 500
) -> bool:
    """Poll until `done()`: first spinning, then yielding the CPU, then sleeping for growing intervals (at most 1 ms).

    Args:
        done: The condition.
        deadline: Deadline on this clock, after which False is returned.
        look: Called before each pause, and occasionally while spinning; may raise an error.
        spins: Number of polls without a pause, unless the deadline passes first.
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
        # Check the deadline each time: with oversubscribed processors, a yield may take milliseconds.
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
