"""Work that runs, or completes, in the thread that waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from unisono.core.threads import DaemonThreadPool
from unisono.core.types import Timeout, Work
from unisono.core.work import Completion, resolve_timeout, timeout_error

if TYPE_CHECKING:
    import torch

__all__ = ["Deferred"]

_LOOK_EVERY_S = 1e-3
_crew = DaemonThreadPool("unisono deferred work")


class Deferred(Work):
    """Work that the first `wait` runs in its own thread.

    Args:
        run: Does the work, until a deadline on the clock of `time.monotonic`.
        timeout_s: Default timeout of `wait`.
        ready: Whether `run` would return, or raise, immediately; None if unknown. A `wait` with a timeout starts
            `run` only when it is ready, so the wait may be repeated.
    """

    def __init__(self, run: Callable[[float], None], timeout_s: float, ready: Callable[[], bool] | None = None) -> None:
        self._run, self._timeout_s, self._ready = run, timeout_s, ready
        self._lock = threading.Lock()
        self._over = False
        self._error: BaseException | None = None
        self._told: Completion | None = None

    def wait(self, timeout: Timeout | None = None) -> None:
        limit = resolve_timeout(timeout, self._timeout_s)
        if timeout is not None and self._ready is not None:
            self._look(self._ready, limit)
            limit = self._timeout_s
        with self._lock:
            if not self._over:
                self._over = True
                try:
                    self._run(time.monotonic() + limit)
                except BaseException as error:
                    # Also an interrupt: every later wait must report how this one ended.
                    self._error = error
        if self._error is not None:
            raise self._error

    def _look(self, ready: Callable[[], bool], timeout: float) -> None:
        """Return when the work is ready; until then, another thread may be in `run`."""
        started = time.monotonic()
        while not ready():
            waited = time.monotonic() - started
            if waited >= timeout:
                raise timeout_error((), waited)
            time.sleep(min(timeout - waited, _LOOK_EVERY_S))

    def is_completed(self) -> bool:
        if not self._over and self._ready is not None and self._ready():
            self._settle()
        return self._over and not self._lock.locked()

    def exception(self) -> BaseException | None:
        return self._error

    def _settle(self) -> BaseException | None:
        try:
            self.wait()
        except BaseException as error:
            # There is no caller to raise it to; the future, or the next wait, reports it.
            return error
        return None

    def get_future(self) -> torch.futures.Future[None]:
        if self._told is None:
            self._told = told = Completion(self._timeout_s)

            def settle() -> None:
                told.complete(self._settle())

            _crew.run(settle)
        return self._told.get_future()
