"""Server side of an agent: runs other ranks' calls and answers them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from unisono.core.transport import Envelope
from unisono.diagnostics.tracebacks import brief_error
from unisono.errors import CommError, PeerLostError
from unisono.rpc.channel import CallTypeError, MessageChannel
from unisono.rpc.context import context, request
from unisono.rpc.exported import is_async
from unisono.rpc.protocol import CALL, ERROR, HEADER, NO_CONTEXT, REMOTE, REPLY, REQUEST
from unisono.rpc.refcount import Key
from unisono.rpc.remote_errors import packed
from unisono.rpc.rref import OwnedValue, RRefContext
from unisono.rpc.workers import Task

__all__ = ["CallServer", "cancelled"]

_log = logging.getLogger(__name__)

_SLOW_S = 200e-6
"""A function that took longer than this time runs in a worker thread next time."""
_LONG_BYTES = 64 << 10
_MAX_REMEMBERED = 1000
"""Maximum number of functions of which a rank remembers whether they are quick or slow."""


class _ServedCall:
    """One call from another rank.

    Attributes:
        target: Name of the function, encoded.
        at: Offset of the arguments in the message.
        positional: Number of positional arguments.
        key: Key of the object whose method is called; None for a function.
        result: Number of the object to create; 0 if the result is returned.
        cancelled: Whether the caller has stopped waiting.
        thread: Thread that runs the function.
        outcome: Outcome of the call if its result remains on this rank.
        called: Object whose method is called; None for a function.
    """

    __slots__ = (
        "at", "called", "cancelled", "context", "key", "kind", "number", "outcome", "peer", "positional", "result",
        "target", "thread",
    )  # fmt: skip

    def __init__(self, message: Envelope) -> None:
        self.kind, self.number, self.context, _ = HEADER.unpack_from(message.head)
        self.result, creator, number, length, self.positional = CALL.unpack_from(message.head, HEADER.size)
        self.at = HEADER.size + CALL.size + length
        self.target = message.head[HEADER.size + CALL.size : self.at]
        if len(self.target) < length:
            raise ValueError("a call that is cut off")
        self.key = Key(creator, number) if creator >= 0 else None
        self.peer = message.peer
        self.cancelled = False
        self.outcome: OwnedValue | None = None
        self.called: OwnedValue | None = None
        self.thread: int | None = None


def cancelled() -> bool:
    """Return whether the rank that called the running function has stopped waiting; if so, the function can stop early.

    Example:
        >>> un.rpc.cancelled()
        False
    """
    now: _ServedCall | None = request.get()
    return now is not None and now.cancelled


class CallServer:
    """Serves other ranks' calls, each from its arrival until its reply is sent.

    Args:
        channel: Channel that decodes calls and sends replies.
        references: Table of this rank's objects.

    Attributes:
        served: Number of calls served for each rank.
    """

    def __init__(self, channel: MessageChannel, references: RRefContext) -> None:
        self._channel = channel
        self._references = references
        self._open: dict[tuple[int, int], _ServedCall] = {}
        # Whether a function is quick (or else slow), by its encoded name. Functions that were neither are not listed.
        self._quick: dict[bytes, bool] = {}
        self._lock = threading.Lock()
        self.served: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def accept(self, message: Envelope) -> tuple[Task, bool]:
        """Accept a call. Return the task that serves the call, and whether this task is likely to be short."""
        call = _ServedCall(message)
        if call.kind == REMOTE:
            # Register the object now, because later messages from the caller may refer to it.
            call.outcome = self._references.expect(Key(message.peer, call.result), message.peer)
        if call.key is not None:
            # Resolve the key before handling the caller's next message, which may drop the reference. An unknown key is
            # reported to the caller when the call is served.
            with contextlib.suppress(PeerLostError):
                call.called = self._references.outcome(call.key)
        long = bool(message.bodies) and sum([b.numel() for b in message.bodies]) > _LONG_BYTES
        short = self._quick.get(call.target, not long)
        # Register the call only after malformed calls have been rejected above, because those would never be removed.
        self._open[message.peer, call.number] = call
        return lambda: self._serve(call, message), short

    def runs_here(self) -> bool:
        """Return whether this thread runs a function that another rank called."""
        now: _ServedCall | None = request.get()
        if now is None or now.thread != threading.get_ident():
            return False
        return self._open.get((now.peer, now.number)) is now

    def cancel(self, peer: int, number: int) -> None:
        """Cancel a request: its caller has stopped waiting."""
        call = self._open.get((peer, number))
        if call is not None:
            call.cancelled = True

    def lose(self, peer: int) -> None:
        """Cancel all requests of a lost rank."""
        for call in list(self._open.values()):
            if call.peer == peer:
                call.cancelled = True

    # -- running -------------------------------------------------------------------------------
    def _serve(self, call: _ServedCall, message: Envelope) -> None:
        call.thread = threading.get_ident()
        before = request.set(call)
        within = context.set(call.context)
        started = time.perf_counter()
        try:
            self._run(call, message)
        except BaseException as error:
            # Report every error to the caller, even SystemExit or KeyboardInterrupt from the function; this thread
            # continues.
            self._fail(call, error)
        finally:
            context.reset(within)
            request.reset(before)
        self._remember(call.target, time.perf_counter() - started)

    def _remember(self, target: bytes, took: float) -> None:
        if _SLOW_S / 2 <= took <= _SLOW_S:
            # A function whose time is between the two limits stays what it was.
            return
        if target in self._quick or len(self._quick) < _MAX_REMEMBERED:
            self._quick[target] = took < _SLOW_S

    def _run(self, call: _ServedCall, message: Envelope) -> None:
        """Run the function, and reply once its result is available."""
        if call.kind == REMOTE:
            # Reply before creating the object: the reply confirms only that the reference is counted, which holds even
            # if the creation fails.
            self._channel.send(message.peer, (REPLY, call.number, NO_CONTEXT), (None,))
        values = self._channel.unpack(message, call.at)
        args = values[: call.positional]
        kwargs = values[call.positional :] or [{}]
        if len(args) < call.positional or len(kwargs) > 1:
            raise ValueError(f"rank {message.peer} sent a call with another number of arguments than it declared")
        if call.kind == REQUEST and call.cancelled:
            raise CommError("this call was cancelled before it began")
        if call.key is not None and call.target == b"@fetch":
            outcome = call.called or self._references.outcome(call.key)
            # The object may not exist yet, so reply once it exists.
            return outcome.when_known(lambda: self._settle(call, outcome.value, outcome.error))
        function = self._function(call, args)
        result = function(*args, **kwargs[0])
        if not is_async(function):
            return self._settle(call, result, None)
        # Check for the base class, because a future's `then` returns an instance of the base class.
        if not isinstance(result, torch._C.Future):
            raise CallTypeError(
                f"{getattr(function, '__qualname__', function)} is marked async_execution, so it must return a "
                f"torch.futures.Future, not {type(result).__name__}"
            )
        result.add_done_callback(lambda future: self._settle_by(call, future))

    def _function(self, call: _ServedCall, args: list[Any]) -> Callable[..., Any]:
        """Return the function to call; if it was sent with the call, remove it from the arguments."""
        exposed = self._channel.exposed
        references = self._references
        if call.key is not None:
            outcome = call.called or references.outcome(call.key)
            return exposed.method(references.value_of(outcome, None), call.target[1:].decode())
        if call.target == b"@call":
            return exposed.given(args.pop(0))
        return exposed.function(call.target.decode("utf-8", "surrogatepass"))

    def _settle_by(self, call: _ServedCall, future: torch.futures.Future[Any]) -> None:
        try:
            value = future.value()
        except BaseException as error:
            # Report any error of the future.
            self._settle(call, None, error)
        else:
            self._settle(call, value, None)

    def _settle(self, call: _ServedCall, value: Any, error: BaseException | None) -> None:
        if error is not None:
            return self._fail(call, error)
        if call.kind == REMOTE:
            assert call.outcome is not None
            call.outcome.settle(value)
        else:
            try:
                self._channel.send(call.peer, (REPLY, call.number, call.context), (value,))
            except CommError:
                # The caller has left, or is not receiving.
                pass
            except Exception as refused:
                return self._fail(call, refused)
        self._done(call)

    def _fail(self, call: _ServedCall, error: BaseException) -> None:
        report = packed(error)
        # Log only a summary: the caller gets the traceback in the reply, but may ignore the reply.
        brief = brief_error(error, None, None).rstrip()
        _log.warning("a call by rank %d failed on rank %d: %s", call.peer, self._channel.rank, brief)
        if call.kind == REMOTE:
            assert call.outcome is not None
            call.outcome.settle(None, error)
        else:
            with contextlib.suppress(CommError):
                self._channel.send(call.peer, (ERROR, call.number, NO_CONTEXT), (report,))
        self._done(call)

    def _done(self, call: _ServedCall) -> None:
        with self._lock:
            if self._open.pop((call.peer, call.number), None) is not None:
                self.served[call.peer] += 1
