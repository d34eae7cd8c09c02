"""Server side of an agent: run the calls of other ranks, and answer them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

import torch

from unisono.core.transport import Envelope
from unisono.core.types import Timeout
from unisono.core.work import resolve_timeout
from unisono.diagnostics.tracebacks import brief_error
from unisono.errors import CommError, CommTimeoutError, PeerLostError
from unisono.rpc.channel import CallTypeError, Channel, MessageWriter
from unisono.rpc.context import context, request
from unisono.rpc.exported import changes, is_async
from unisono.rpc.protocol import CALL, ERROR, HEADER, NO_CONTEXT, REMOTE, REPLY, REQUEST, WorkerInfo
from unisono.rpc.receiver import CallFuture, Task
from unisono.rpc.refcount import Key, References
from unisono.rpc.remote_errors import packed

__all__ = ["Calls", "OwnedValue", "RRefContext", "Server", "cancelled"]

_log = logging.getLogger(__name__)

_SLOW_S = 200e-6
"""A function that took longer than this is run outside the receiving thread the next time."""
_LONG_BYTES = 64 << 10
_MAX_CACHED = 1000


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
        self._channel = channel
        self._references = references
        self._open: dict[tuple[int, int], _Request] = {}
        self._slow: set[bytes] = set()
        self._quick: set[bytes] = set()
        self._functions: dict[bytes, Callable[..., Any]] = {}
        self._as_of = changes()
        self._lock = threading.Lock()
        self.served: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def accept(self, message: Envelope) -> tuple[Task, bool]:
        """Accept a call. Return its task, and whether that is likely to be short."""
        call = _Request(message)
        if call.kind == REMOTE:
            # Counted now, because later messages of this rank about the object must follow.
            call.outcome = self._references.expect(Key(message.peer, call.result), message.peer)
        if call.key is not None:
            # Resolved before the caller's next message is handled, which may drop the reference. An unknown key is
            # reported to the caller when the call is served.
            with contextlib.suppress(PeerLostError):
                call.called = self._references.outcome(call.key)
        long = bool(message.bodies) and sum([b.numel() for b in message.bodies]) > _LONG_BYTES
        short = call.target in self._quick if long else call.target not in self._slow
        # Malformed calls have been rejected by now: they would never end.
        self._open[message.peer, call.number] = call
        return lambda: self._serve(call, message), short

    def runs_here(self) -> bool:
        """Return whether this thread runs a function that another rank called."""
        now: _Request | None = request.get()
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
    def _serve(self, call: _Request, message: Envelope) -> None:
        call.thread = threading.get_ident()
        before = request.set(call)
        within = context.set(call.context)
        started = time.perf_counter()
        try:
            self._answer_with(call, self._run(call, message))
        except BaseException as error:
            # Including an exit or interrupt raised by the function: it is reported to the caller; this thread goes on.
            self._fail(call, error)
        finally:
            context.reset(within)
            request.reset(before)
        self._remember(call.target, time.perf_counter() - started)

    def _remember(self, target: bytes, took: float) -> None:
        if took > _SLOW_S:
            self._quick.discard(target)
            if len(self._slow) < _MAX_CACHED:
                self._slow.add(target)
        elif took < _SLOW_S / 2 and target not in self._quick:
            self._slow.discard(target)
            if len(self._quick) < _MAX_CACHED:
                self._quick.add(target)

    def _run(self, call: _Request, message: Envelope) -> Any:
        if call.kind == REMOTE:
            # The object is counted, even if creating it fails.
            self._channel.send(message.peer, (REPLY, call.number, NO_CONTEXT), (None,))
        values = self._channel.unpack(message, call.at)
        args = values[: call.positional]
        kwargs = values[call.positional :] or [{}]
        if len(args) < call.positional or len(kwargs) > 1:
            raise ValueError(f"rank {message.peer} sent a call with another number of arguments than it declared")
        if call.kind == REQUEST and call.cancelled:
            raise CommError("this call was cancelled before it began")
        if call.key is not None and call.target == b"@fetch":
            return _DeferredValue(call.called or self._references.outcome(call.key))
        function = self._function(call, args)
        result = function(*args, **kwargs[0])
        return result if not is_async(function) else _future(result, function)

    def _function(self, call: _Request, args: list[Any]) -> Callable[..., Any]:
        """Return the function to call; one that was sent along is removed from the arguments."""
        exposed = self._channel.exposed
        references = self._references
        if call.key is not None:
            outcome = call.called or references.outcome(call.key)
            return exposed.method(references.value_of(outcome, None), call.target[1:].decode())
        if call.target == b"@call":
            return exposed.given(args.pop(0))
        if self._as_of != changes():
            self._as_of = changes()
            self._functions.clear()
        function = self._functions.get(call.target)
        if function is None:
            name = call.target.decode("utf-8", "surrogatepass")
            function = exposed.function(name)
            if len(self._functions) < _MAX_CACHED and exposed.lists(name):
                self._functions[call.target] = function
        return function

    def _answer_with(self, call: _Request, result: Any) -> None:
        if isinstance(result, _DeferredValue):
            result.then(lambda outcome: self._settle(call, outcome.value, outcome.error))
        elif isinstance(result, _FutureReply):
            result.future.add_done_callback(lambda future: self._settle_by(call, future))
        else:
            self._settle(call, result, None)

    def _settle_by(self, call: _Request, future: torch.futures.Future[Any]) -> None:
        try:
            value = future.value()
        except BaseException as error:
            # Whatever the future ended with.
            self._settle(call, None, error)
        else:
            self._settle(call, value, None)

    def _settle(self, call: _Request, value: Any, error: BaseException | None) -> None:
        if error is not None:
            return self._fail(call, error)
        if call.kind == REMOTE:
            assert call.outcome is not None
            call.outcome.settle(value)
        else:
            try:
                self._channel.send(call.peer, (REPLY, call.number, call.context), (value,))
            except CommError:
                # The caller has left, or does not receive.
                pass
            except Exception as refused:
                return self._fail(call, refused)
        self._done(call)

    def _fail(self, call: _Request, error: BaseException) -> None:
        report = packed(error)
        # The caller, who may not look at the answer, gets the traceback.
        brief = brief_error(error, None, None).rstrip()
        _log.warning("a call by rank %d failed on rank %d: %s", call.peer, self._channel.rank, brief)
        if call.kind == REMOTE:
            assert call.outcome is not None
            call.outcome.settle(None, error)
        else:
            with contextlib.suppress(CommError):
                self._channel.send(call.peer, (ERROR, call.number, NO_CONTEXT), (report,))
        self._done(call)

    def _done(self, call: _Request) -> None:
        with self._lock:
            if self._open.pop((call.peer, call.number), None) is not None:
                self.served[call.peer] += 1


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


class OwnedValue:
    """Outcome of creating an object: a value, or the error that prevented it."""

    __slots__ = ("_callbacks", "_lock", "error", "known", "trace", "value")

    def __init__(self) -> None:
        self.known = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.trace: TracebackType | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def settle(self, value: Any, error: BaseException | None = None) -> None:
        """Set the outcome. Only the first call counts."""
        with self._lock:
            if self.known:
                return
            self.value = value
            self.error = error
            self.known = True
            self.trace = error.__traceback__ if error is not None else None
            callbacks = self._callbacks
            self._callbacks = []
        for callback in callbacks:
            callback()

    def when_known(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the outcome is known; immediately if it is."""
        with self._lock:
            if not self.known:
                self._callbacks.append(callback)
                return
        callback()


class Calls(Protocol):
    """Calls of methods of an object, each with its owner, the method's name and the object's key."""

    def call(self, peer: int, target: str, key: Key, args: Any, kwargs: Any, timeout: Timeout | None, /) -> Any:
        """Call and wait for the result."""

    def start(self, peer: int, target: str, key: Key, args: Any, kwargs: Any, timeout: Timeout | None, /) -> Any:
        """Call and return a future."""

    def make(self, peer: int, target: str, key: Key, args: Any, kwargs: Any, timeout: Timeout | None, /) -> Any:
        """Call and return a reference to the result."""


class RRefContext:
    """References of one agent: the protocol of `refcount`, with `RRef`s for handles and `OwnedValue`s for values.

    Args:
        channel: Notifies other ranks.
        infos: Addresses of all ranks.
        timeout_s: Default seconds to wait for an object.
        not_counted: Context in which this thread waits.
        kind: Class of the references, such as `RRef`.

    Attributes:
        client: Set by the agent.
        backward: Back-propagates from a reference, in a context; set by autograd.
    """

    client: Calls
    backward: Callable[[Any, int, bool], None]

    def __init__(
        self,
        channel: Channel,
        infos: Sequence[WorkerInfo],
        timeout_s: float,
        not_counted: Callable[[], AbstractContextManager[object]],
        kind: type[Any],
    ) -> None:
        self.rank = channel.rank
        self.infos = infos
        self.wake = channel.box.wake
        self._timeout_s = timeout_s
        self._not_counted = not_counted
        self._kind = kind
        self._protocol = References(self.rank, channel.send_control, OwnedValue)
        self.arrived = self._protocol.arrived
        self.dropped = self._protocol.dropped
        self.new_key = self._protocol.new_key
        self.unused = self._protocol.unused

    def __len__(self) -> int:
        return len(self._protocol.ledger)

    @property
    def pins(self) -> int:
        """Return the number of references pinned for the ranks that they were passed on to."""
        return self._protocol.pins

    @property
    def waiting(self) -> bool:
        """Return whether there is something to `flush`."""
        return self._protocol.waiting

    def flush(self) -> None:
        """Notify owners of the references that were dropped here."""
        self._protocol.flush()
        self.collect_freed()

    def collect_freed(self) -> None:
        """Release freed objects; their finalizers may do anything."""
        freed = self._protocol.freed
        while freed:
            freed.popleft()

    def reference(self, owner: int, key: Key, confirmation: CallFuture | None = None) -> Any:
        """Return a new reference, which has been counted already."""
        rref = object.__new__(self._kind)
        rref._bind(self, owner, key, confirmation)
        return rref

    def own(self, value: Any) -> Key:
        """Register an object of this rank; counts one reference."""
        key = self.new_key(self.rank)
        self.expect(key, self.rank).settle(value)
        return key

    def expect(self, key: Key, holder: int) -> OwnedValue:
        """Return the outcome of an object about to be created; counts one reference."""
        with self._protocol.lock:
            outcome: OwnedValue = self._protocol.ledger.make(key, holder)
        return outcome

    def outcome(self, key: Key) -> OwnedValue:
        """Return the outcome of a referenced object. Raises PeerLostError if it was freed."""
        with self._protocol.lock:
            outcome: OwnedValue | None = self._protocol.ledger.value(key)
        if outcome is None:
            raise PeerLostError("the object was freed: every rank that was known to refer to it has died or dropped it")
        return outcome

    def wait(self, key: Key, timeout: Timeout | None) -> Any:
        """Return the value of an object of this rank."""
        return self.value_of(self.outcome(key), timeout)

    def value_of(self, outcome: OwnedValue, timeout: Timeout | None) -> Any:
        """Wait for an outcome and return its value; the object need not be referenced any more."""
        if not outcome.known:
            self._wait_known(outcome, resolve_timeout(timeout, self._timeout_s))
        if outcome.error is not None:
            # The same error is raised each time, so drop the traceback entries of earlier raises.
            raise outcome.error.with_traceback(outcome.trace)
        return outcome.value

    def _wait_known(self, outcome: OwnedValue, seconds: float) -> None:
        known = threading.Event()
        outcome.when_known(known.set)
        with self._not_counted():
            if not known.wait(seconds):
                raise CommTimeoutError(
                    f"waited {seconds:.1f} s for an object that is still being created", waited_s=seconds
                )

    def pass_on(self, rref: Any, parts: MessageWriter) -> tuple[int, int, int, int]:
        """Prepare a reference for a rank; return the numbers to send."""
        if rref._references is not self:
            raise CommError("this RRef belongs to another agent, on another communicator")
        rref._check()
        token, undo = self._protocol.give(rref._owner, rref._key, rref, parts.peer)
        parts.undo.append(undo)
        return rref._owner, *rref._key, token

    def accept(self, passer: int, owner: int, creator: int, number: int, token: int) -> Any:
        """Return the reference for received numbers."""
        if not 0 <= owner < len(self.infos) or not 0 <= creator < len(self.infos):
            raise ValueError(f"an object names rank {owner} or {creator}, which does not exist")
        rref = self.reference(owner, Key(creator, number))
        self._protocol.take(passer, owner, rref._key, token, rref)
        return rref

    def lose(self, peer: int, error: BaseException) -> None:
        """Handle a lost rank."""
        for outcome in self._protocol.lose(peer):
            outcome.settle(None, error)
