"""Server side of an agent: run the calls of other ranks, and answer them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from unisono.core.mailbox import Envelope
from unisono.errors import CommError, PeerLostError
from unisono.rpc.channel import CallTypeError, Channel
from unisono.rpc.context import context, request
from unisono.rpc.exported import changes, is_async
from unisono.rpc.protocol import CALL, ERROR, HEADER, NO_CONTEXT, REMOTE, REPLY, REQUEST
from unisono.rpc.receiver import Task
from unisono.rpc.refcount import Key
from unisono.rpc.remote_errors import packed
from unisono.rpc.rref_context import OwnedValue, RRefContext

__all__ = ["Server", "cancelled"]

_log = logging.getLogger(__name__)

_SLOW_S = 200e-6
"""A function that took longer than this is run outside the receiving thread the next time."""
_LONG_BYTES = 64 << 10
_KEPT = 1000


class _Request:
    """One call of another rank.

    Attributes:
        target: Name of the function, encoded.
        at: Offset of the arguments in the message.
        positional: Number of positional arguments.
        key: Key of the object whose method is called, if any.
        result: Number of the object to create; 0 if the result is returned.
        cancelled: Whether its caller has stopped waiting.
        thread: Thread that runs its function.
        outcome: Holder of its result, if that stays here.
        called: Object that the method is called on, if any.
    """

    __slots__ = (
        "at", "called", "cancelled", "context", "key", "kind", "number", "outcome", "peer", "positional", "result",
        "target", "thread",
    )  # fmt: skip

    def __init__(self, mail: Envelope) -> None:
        self.kind, self.number, self.context, _ = HEADER.unpack_from(mail.head)
        self.result, creator, number, length, self.positional = CALL.unpack_from(mail.head, HEADER.size)
        self.at = HEADER.size + CALL.size + length
        self.target = mail.head[HEADER.size + CALL.size : self.at]
        if len(self.target) < length:
            raise ValueError("a call that is cut off")
        self.key = Key(creator, number) if creator >= 0 else None
        self.peer = mail.peer
        self.cancelled = False
        self.outcome: OwnedValue | None = None
        self.called: OwnedValue | None = None
        self.thread: int | None = None


def cancelled() -> bool:
    """Return whether the rank that called the running function has stopped waiting, so that work can be skipped.

    Example:
        >>> un.rpc.cancelled()
        False
    """
    now: _Request | None = request.get()
    return now is not None and now.cancelled


class Server:
    """Calls of other ranks, from their arrival until they are answered.

    Args:
        channel: Reads calls and sends answers.
        references: Holds the objects of this rank.

    Attributes:
        served: Number of calls served for each rank.
    """

    def __init__(self, channel: Channel, references: RRefContext) -> None:
        self._channel, self._references = channel, references
        self._open: dict[tuple[int, int], _Request] = {}
        self._slow: set[bytes] = set()
        self._quick: set[bytes] = set()
        self._functions: dict[bytes, Callable[..., Any]] = {}
        self._as_of = changes()
        self._lock = threading.Lock()
        self.served: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def accept(self, mail: Envelope) -> tuple[Task, bool]:
        """Accept a call. Return its task, and whether that is likely to be short."""
        asked = _Request(mail)
        if asked.kind == REMOTE:
            # Counted now, because later messages of this rank about the object must follow.
            asked.outcome = self._references.expect(Key(mail.peer, asked.result), mail.peer)
        if asked.key is not None:
            # Resolved before the caller's next message is handled, which may drop the reference. An unknown key is
            # reported to the caller when the call is served.
            with contextlib.suppress(PeerLostError):
                asked.called = self._references.outcome(asked.key)
        long = bool(mail.bodies) and sum([b.numel() for b in mail.bodies]) > _LONG_BYTES
        short = asked.target in self._quick if long else asked.target not in self._slow
        # Malformed calls have been rejected by now: they would never end.
        self._open[mail.peer, asked.number] = asked
        return lambda: self._serve(asked, mail), short

    def runs_here(self) -> bool:
        """Return whether this thread runs a function that another rank called."""
        now: _Request | None = request.get()
        if now is None or now.thread != threading.get_ident():
            return False
        return self._open.get((now.peer, now.number)) is now

    def cancel(self, peer: int, number: int) -> None:
        """Cancel a request: its caller has stopped waiting."""
        asked = self._open.get((peer, number))
        if asked is not None:
            asked.cancelled = True

    def lose(self, peer: int) -> None:
        """Cancel all requests of a lost rank."""
        for asked in list(self._open.values()):
            if asked.peer == peer:
                asked.cancelled = True

    # -- running -------------------------------------------------------------------------------
    def _serve(self, asked: _Request, mail: Envelope) -> None:
        asked.thread = threading.get_ident()
        before, within = request.set(asked), context.set(asked.context)
        started = time.perf_counter()
        try:
            self._answer_with(asked, self._run(asked, mail))
        except BaseException as error:
            # Including an exit or interrupt raised by the function: it is reported to the caller; this thread goes on.
            self._fail(asked, error)
        finally:
            context.reset(within)
            request.reset(before)
        self._remember(asked.target, time.perf_counter() - started)

    def _remember(self, target: bytes, took: float) -> None:
        if took > _SLOW_S:
            self._quick.discard(target)
            if len(self._slow) < _KEPT:
                self._slow.add(target)
        elif took < _SLOW_S / 2 and target not in self._quick:
            self._slow.discard(target)
            if len(self._quick) < _KEPT:
                self._quick.add(target)

    def _run(self, asked: _Request, mail: Envelope) -> Any:
        if asked.kind == REMOTE:
            # The object is counted, even if creating it fails.
            self._channel.send(mail.peer, (REPLY, asked.number, NO_CONTEXT), (None,))
        values = self._channel.unpack(mail, asked.at)
        args, kwargs = values[: asked.positional], values[asked.positional :] or [{}]
        if len(args) < asked.positional or len(kwargs) > 1:
            raise ValueError(f"rank {mail.peer} sent a call with another number of arguments than it declared")
        if asked.kind == REQUEST and asked.cancelled:
            raise CommError("this call was cancelled before it began")
        if asked.key is not None and asked.target == b"@fetch":
            return _DeferredValue(asked.called or self._references.outcome(asked.key))
        function = self._function(asked, args)
        result = function(*args, **kwargs[0])
        return result if not is_async(function) else _future(result, function)

    def _function(self, asked: _Request, args: list[Any]) -> Callable[..., Any]:
        """Return the function to call; one that was sent along is removed from the arguments."""
        exposed, references = self._channel.exposed, self._references
        if asked.key is not None:
            outcome = asked.called or references.outcome(asked.key)
            return exposed.method(references.value_of(outcome, None), asked.target[1:].decode())
        if asked.target == b"@call":
            return exposed.given(args.pop(0))
        if self._as_of != changes():
            self._as_of = changes()
            self._functions.clear()
        function = self._functions.get(asked.target)
        if function is None:
            name = asked.target.decode("utf-8", "surrogatepass")
            function = exposed.function(name)
            if len(self._functions) < _KEPT and exposed.lists(name):
                self._functions[asked.target] = function
        return function

    def _answer_with(self, asked: _Request, result: Any) -> None:
        if isinstance(result, _DeferredValue):
            result.then(lambda outcome: self._settle(asked, outcome.value, outcome.error))
        elif isinstance(result, _FutureReply):
            result.future.add_done_callback(lambda future: self._settle_by(asked, future))
        else:
            self._settle(asked, result, None)

    def _settle_by(self, asked: _Request, future: torch.futures.Future[Any]) -> None:
        try:
            value = future.value()
        except BaseException as error:
            # Whatever the future ended with.
            self._settle(asked, None, error)
        else:
            self._settle(asked, value, None)

    def _settle(self, asked: _Request, value: Any, error: BaseException | None) -> None:
        if error is not None:
            return self._fail(asked, error)
        if asked.kind == REMOTE:
            assert asked.outcome is not None
            asked.outcome.settle(value)
        else:
            try:
                self._channel.send(asked.peer, (REPLY, asked.number, asked.context), (value,))
            except CommError:
                # The caller has left, or does not receive.
                pass
            except Exception as refused:
                return self._fail(asked, refused)
        self._done(asked)

    def _fail(self, asked: _Request, error: BaseException) -> None:
        told = packed(error)
        # The traceback as text: records may be kept, and must not keep what is in its frames.
        _log.warning("a call by rank %d failed on rank %d:\n%s", asked.peer, self._channel.rank, told[3])
        if asked.kind == REMOTE:
            assert asked.outcome is not None
            asked.outcome.settle(None, error)
        else:
            with contextlib.suppress(CommError):
                self._channel.send(asked.peer, (ERROR, asked.number, NO_CONTEXT), (told,))
        self._done(asked)

    def _done(self, asked: _Request) -> None:
        with self._lock:
            if self._open.pop((asked.peer, asked.number), None) is not None:
                self.served[asked.peer] += 1


class _DeferredValue:
    """Return the value of an object that may not exist yet."""

    def __init__(self, outcome: OwnedValue) -> None:
        self._outcome = outcome

    def then(self, action: Callable[[OwnedValue], None]) -> None:
        self._outcome.when_known(lambda: action(self._outcome))


class _FutureReply:
    """Return the future that a function marked with `async_execution` returned."""

    def __init__(self, future: torch._C.Future[Any]) -> None:
        self.future = future


def _future(result: Any, function: Callable[..., Any]) -> _FutureReply:
    # What `then` returns is of the base class.
    if not isinstance(result, torch._C.Future):
        raise CallTypeError(
            f"{getattr(function, '__qualname__', function)} is marked async_execution, so it must return a "
            f"torch.futures.Future, not {type(result).__name__}"
        )
    return _FutureReply(result)
