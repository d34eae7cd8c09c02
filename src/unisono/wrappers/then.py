"""A work with something left to do, or to find out, when it has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from unisono.types import Work

__all__ = ["Then"]


class Then(Work):
    """Calls `after` once, when somebody first learns that `inner` has ended well; its error becomes the work's."""

    def __init__(self, inner: Work, after: Callable[[], object]) -> None:
        self._inner, self._after = inner, after
        self._lock = threading.Lock()
        self._over = False
        self._error: BaseException | None = None

    def wait(self, timeout: float | None = None) -> None:
        self._inner.wait(timeout)
        self._settle()
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        if not self._inner.is_completed():
            return False
        if self._inner.exception() is None:
            self._settle()
        return True

    def exception(self) -> BaseException | None:
        return self._inner.exception() or self._error

    def get_future(self) -> torch.futures.Future[None]:
        future: torch.futures.Future[None] = torch.futures.Future()

        def settle(inner: torch.futures.Future[None]) -> None:
            try:
                inner.value()
                self._settle()
                if self._error is not None:
                    raise self._error
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]  # torch takes any exception
            else:
                future.set_result(None)

        self._inner.get_future().add_done_callback(settle)
        return future

    def cancel(self) -> bool:
        return self._inner.cancel()

    def _settle(self) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
            try:
                self._after()
            except Exception as error:
                # Every later wait has to say how this one ended.
                self._error = error
