"""Future of a remote call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CallFuture"]


class CallFuture(torch.futures.Future[Any]):
    """Future of a call made by `rpc_async`, with `cancel`.

    Args:
        attend: Function that receives messages until the call has ended or timed out.
        cancel: Function that cancels the call; it returns whether the call was still pending.
    """

    def __init__(self, attend: Callable[[], None], cancel: Callable[[], bool]) -> None:
        super().__init__()
        self._attend = attend
        self._cancel = cancel

    def wait(self) -> Any:
        """Wait for the result and return it, or raise the error; this thread receives messages while it waits."""
        if not self.done():
            self._attend()
        return super().wait()

    def cancel(self) -> bool:
        """Cancel the call: the future fails with `AbortedError`, and a function that has not started never runs.

        Returns whether the call was still pending. A function that is already running finishes, and its result is
        dropped.
        """
        return self._cancel()
