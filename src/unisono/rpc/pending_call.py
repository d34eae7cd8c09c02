"""A call to another rank, from its request until its reply or error."""

from __future__ import annotations

from typing import Any

from unisono.core import clock
from unisono.core.threads import AutoResetEvent
from unisono.core.transport import Envelope
from unisono.errors import AbortedError, CommTimeoutError
from unisono.rpc.call_future import CallFuture
from unisono.rpc.context import context, request

__all__ = ["PendingCall"]


class PendingCall:
    """One call. A call ends once, with a reply or an error, whichever comes first.

    Attributes:
        number, peer: The call's number, and the rank called.
        name: Name of the function, for messages.
        started, timeout: Start time on the library's clock, and timeout in seconds.
        future: Future to complete when the call ends; None if a thread waits for the call without a future.
        nbytes: Size of the request in bytes, as counted by flow control.
        reply: The reply as received.
        error: Error that ended the call without a reply.
        done: Whether a waiter may continue: `reply` or `error` is set, and the future, if any, is complete.
        within: Autograd context of the call, and the request, if any, that the calling thread was serving. Callbacks of
            the call's future run in the same context and request.
    """

    __slots__ = (
        "_ended", "done", "error", "future", "name", "nbytes", "number", "peer", "reply", "started", "timeout", "within"
    )  # fmt: skip

    def __init__(self, number: int, peer: int, name: str, timeout: float) -> None:
        self.number: int = number
        self.peer: int = peer
        self.name: str = name
        self.timeout: float = timeout
        self.started: float = clock.now()
        self.future: CallFuture | None = None
        self.within: tuple[int, Any] = context.get(), request.get()
        self.reply: Envelope | None = None
        self.error: BaseException | None = None
        self.done: bool = False
        self.nbytes: int = 0
        self._ended = AutoResetEvent()

    def wake_waiter(self) -> None:
        """Set `done`, and wake the thread that waits for this call. Either `reply` or `error` must already be set."""
        self.done = True
        self._ended.set()

    def sleep(self, seconds: float) -> None:
        """Wait until the call has ended, or the time is up."""
        if clock.wait(self._ended, clock.now() + seconds):
            # Wake the next waiter, because another thread may wait for the same future.
            self._ended.set()

    def timeout_error(self) -> CommTimeoutError:
        """Return the error for a call that has timed out."""
        waited = clock.now() - self.started
        return CommTimeoutError(
            f"waited {waited:.1f} s for rank {self.peer} to answer {self.name}. It may still run there; pass a "
            "longer timeout if it needs more time",
            peer=self.peer,
            waited_s=waited,
            operation="rpc",
        )

    def cancelled_error(self) -> AbortedError:
        """Return the error for a cancelled call."""
        message = f"the call of {self.name} on rank {self.peer} was cancelled"
        return AbortedError(message, peer=self.peer, operation="rpc")
