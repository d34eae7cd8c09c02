"""Comparison of calls in a thread beside the one that makes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from unisono.core.call import MAY_BE_WRONG, NOTHING_SENT, Fingerprint
from unisono.core.threads import SerialWorker
from unisono.errors import MismatchError

__all__ = ["LaterComparison", "Report"]

Report = Callable[[BaseException, Fingerprint], None]
"""Reports the error of a comparison to the group; called in the thread that compares."""

_AHEAD = 64
"""Calls that may be made before they are compared.

A device's queue of launches has about a thousand places, and a launch into a full queue blocks its thread: the rank
must not get that far ahead of one that does not come.
"""


class LaterComparison:
    """Compares calls in their order, each while it runs. The calling thread waits only if it gets far ahead.

    Args:
        compare: Compares one call, until a deadline, as `Comparer.compare`.
        report: Called with the first error. Nothing is compared after it.
        name: Of the thread.
    """

    def __init__(self, compare: Callable[[Fingerprint, float], None], report: Report, name: str) -> None:
        self._compare = compare
        self._report = report
        self._worker = SerialWorker(name)
        self._added = 0
        # Written by the worker alone. A reader that misses its last change waits in `settle` for nothing.
        self._compared = 0
        self._failed = False
        self._ended = False

    def add(self, fingerprint: Fingerprint, deadline: float) -> None:
        """Let a call be compared. Call it before the call itself, whose launch may wait for the other ranks."""
        if self._added - self._compared >= _AHEAD:
            self.settle()
        self._added += 1
        self._worker.run(partial(self._compare_one, fingerprint, deadline))

    def settle(self) -> None:
        """Return when every call that was added has been compared, or a comparison has failed."""
        if self._compared < self._added and not self._ended:
            settled = threading.Event()
            self._worker.run(settled.set)
            settled.wait()

    def end(self) -> None:
        """Let the thread end after the last comparison. Call `settle` before."""
        self._ended = True
        self._worker.end()

    def _compare_one(self, fingerprint: Fingerprint, deadline: float) -> None:
        try:
            if not self._failed:
                self._compare(fingerprint, deadline)
        except BaseException as error:
            self._failed = True
            if isinstance(error, MismatchError):
                error.message = error.message.replace(NOTHING_SENT, f"This is call {fingerprint.call}. {MAY_BE_WRONG}")
            self._report(error, fingerprint)
        self._compared += 1
