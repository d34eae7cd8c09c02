"""Compares calls in a separate thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from unisono.core.call import MAY_BE_WRONG, NOTHING_SENT, Fingerprint
from unisono.core.threads import SerialWorker
from unisono.errors import MismatchError

__all__ = ["LaterComparison", "Report"]

Report = Callable[[BaseException, Fingerprint], None]
"""Function that reports a comparison's error to the group. Called in the comparing thread."""

_AHEAD = 64
"""Maximum number of calls that have not been compared yet.

A device's launch queue has about a thousand entries, and a launch into a full queue blocks the calling thread. If a
rank never makes a call, its peers must stop before their queues are full.
"""


class LaterComparison:
    """Compares calls in order while they run. The calling thread waits only if it is far ahead of the comparisons.

    Args:
        compare: Function that compares one call, waiting until a deadline at most, as `Comparer.compare` does.
        report: Function called with the first error, after which no more calls are compared.
        name: Name of the thread.
    """

    def __init__(self, compare: Callable[[Fingerprint, float], None], report: Report, name: str) -> None:
        self._compare = compare
        self._report = report
        self._worker = SerialWorker(name)
        self._added = 0
        # Only the worker thread writes this number, so no lock is needed: a reader that misses the last write merely
        # calls `settle` needlessly.
        self._compared = 0
        self._failed = False
        self._ended = False

    def add(self, fingerprint: Fingerprint, deadline: float) -> None:
        """Queue a call for comparison. A call must be queued before its launch, which may wait for other ranks."""
        if self._added - self._compared >= _AHEAD:
            self.settle()
        self._added += 1
        self._worker.run(partial(self._compare_one, fingerprint, deadline))

    def settle(self) -> None:
        """Wait until every added call has been compared or a comparison has failed."""
        if self._compared < self._added and not self._ended:
            settled = threading.Event()
            self._worker.run(settled.set)
            settled.wait()

    def end(self) -> None:
        """End the thread after the last comparison. Call `settle` first."""
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
