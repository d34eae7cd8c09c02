"""Persistent requests: a call whose arguments are given once, and which is started many times."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from unisono.core.types import Timeout, Work

__all__ = ["PersistentRequest", "starter"]


class PersistentRequest:
    """Call with its arguments, as costly as an asynchronous call; `work` is the `Work` of the last start, or None."""

    def __init__(self, call: Callable[[], Work]) -> None:
        self._call = call
        self._active = False
        self.work: Work | None = None

    def start(self) -> None:
        """Make the call, with what the buffers hold now. `RuntimeError` before the `wait` of the previous start."""
        if self._active and self.work is not None and self.work.exception() is None:
            raise RuntimeError("this request has been started before; call wait() before it is started again")
        self.work = self._call()
        self._active = True

    def wait(self, timeout: Timeout | None = None) -> None:
        """Return when the started call is done, as `Work.wait`; immediately if none was started."""
        if self.work is not None:
            self.work.wait(timeout)
        self._active = False


def starter(name: str) -> Callable[..., PersistentRequest]:
    """Return a method that prepares calls of another method.

    Args:
        name: The other method.
    """

    def init(self: object, *arguments: Any, **options: Any) -> PersistentRequest:
        how = {} if name in ("isend", "irecv") else {"async_op": True}
        return PersistentRequest(partial(getattr(self, name), *arguments, **options, **how))

    init.__doc__ = f"""Return a `PersistentRequest`: each `start()` calls `{name}`, and `wait()` ends the call.

        Args:
            arguments, options: As for `{name}`, but `async_op`. They are checked at each start.

        Example:
            >>> with un.init() as comm:
            ...     total = comm.all_reduce_init([1.5])
            ...     total.start() or total.wait()
        """
    return init
