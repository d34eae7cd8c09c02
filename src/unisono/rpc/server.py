"""Server side of an agent: run the calls of other ranks, and answer them."""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from unisono.core.mailbox import Envelope
from unisono.errors import CommError, PeerLostError
from unisono.rpc.context import context, request
from unisono.rpc.exported import changes, is_async
from unisono.rpc.protocol import ERROR, HEADER, REMOTE, REPLY, REQUEST
from unisono.rpc.refcount import Key
from unisono.rpc.remote_errors import packed
from unisono.rpc.rref import OwnedValue
from unisono.rpc.serialize import CallTypeError, unpack
from unisono.serialization.format import take_text

if TYPE_CHECKING:
    from unisono.rpc.agent import Agent
    from unisono.rpc.receiver import Task

__all__ = ["Server", "cancelled"]

_log = logging.getLogger(__name__)

_SLOW_S = 200e-6
"""A function that took longer than this is run outside the receiving thread the next time."""
_LONG_BYTES = 64 << 10
_NUMBER = struct.Struct("<q")
_KEPT = 1000
_NONE = ord("N")
_KEY = struct.Struct("<3sqcq")
"""An object's key among the values of a call: a tuple of two whole numbers."""


class _Request:
    """One call of another rank.

    Attributes:
        cancelled: Whether its caller has stopped waiting.
        thread: Thread that runs its function.
        outcome: Holder of its result, if that stays here.
        called: Object that the method is called on, if any.
    """

    __slots__ = ("called", "cancelled", "context", "kind", "message", "number", "outcome", "peer", "thread")

    def __init__(self, mail: Envelope) -> None:
        self.kind, self.number, self.context, self.message = HEADER.unpack_from(mail.head)
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
    """Calls of other ranks, from their arrival until they are answered."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
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
        start = HEADER.size + (1 + _NUMBER.size if asked.kind == REMOTE else 0)
        target = mail.head[start : take_text(mail.head, start + 1)[1]]
        if asked.kind == REMOTE:
            # Counted now, because later messages of this rank about the object must follow.
            key = Key(mail.peer, _NUMBER.unpack_from(mail.head, HEADER.size + 1)[0])
            asked.outcome = self._agent.references.expect(key, mail.peer)
        asked.called = self._called(mail.head, start + len(target))
        long = bool(mail.bodies) and sum([b.numel() for b in mail.bodies]) > _LONG_BYTES
        short = target in self._quick if long else target not in self._slow
        # Malformed calls have been rejected by now: they would never end.
        self._open[mail.peer, asked.number] = asked
        return lambda: self._serve(asked, mail, target), short

    def _called(self, head: bytes, at: int) -> OwnedValue | None:
        """Resolve a call's key before its caller's next message is handled, which may drop the reference."""
        if head[at : at + 1] == b"N" or len(head) < at + _KEY.size:
            return None
        kinds, creator, kind, number = _KEY.unpack_from(head, at)
        # An invalid or unknown key is reported to the caller when the call is served.
        if (kinds, kind) != (b"t\2i", b"i"):
            return None
        with contextlib.suppress(PeerLostError):
            return self._agent.references.outcome(Key(creator, number))
        return None

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
    def _serve(self, asked: _Request, mail: Envelope, target: bytes) -> None:
        asked.thread = threading.get_ident()
        before, within = request.set(asked), context.set(asked.context)
        started = time.perf_counter()
        try:
            self._answer_with(asked, self._run(asked, mail, target))
        except BaseException as error:
            # Including an exit or interrupt raised by the function: it is reported to the caller; this thread goes on.
            self._fail(asked, error)
        finally:
            context.reset(within)
            request.reset(before)
        self._remember(target, time.perf_counter() - started)

    def _remember(self, target: bytes, took: float) -> None:
        if took > _SLOW_S:
            self._quick.discard(target)
            if len(self._slow) < _KEPT:
                self._slow.add(target)
        elif took < _SLOW_S / 2 and target not in self._quick:
            self._slow.discard(target)
            if len(self._quick) < _KEPT:
                self._quick.add(target)

    def _run(self, asked: _Request, mail: Envelope, named: bytes) -> Any:
        agent, context, message = self._agent, asked.context, asked.message
        at = HEADER.size + len(named)
        if self._as_of != changes():
            self._as_of = changes()
            self._functions.clear()
        function = self._functions.get(named)
        if asked.kind == REQUEST and function is not None and mail.head[at] == _NONE and not asked.cancelled:
            # The function was resolved before: only the arguments have to be decoded.
            args, kwargs = unpack(agent, mail, context, message, at + 1, 2)
            return self._result(function, args, kwargs)
        if asked.kind == REMOTE:
            # The object is counted, even if creating it fails.
            agent.office.send(mail.peer, REPLY, asked.number, (None,))
        values = unpack(agent, mail, context, message, HEADER.size, 4 if asked.kind == REQUEST else 5)
        target, key, args, kwargs = values[-4:]
        if asked.kind == REQUEST and asked.cancelled:
            raise CommError("this call was cancelled before it began")
        if key is not None:
            outcome = asked.called or agent.references.outcome(Key(*key))
            if target == "@fetch":
                return _DeferredValue(outcome)
            function = agent.exposed.method(agent.references.value_of(outcome, None), target[1:])
        elif target == "@call":
            function, args = agent.exposed.given(args[0]), args[1:]
        else:
            function = agent.exposed.function(target)
            if len(self._functions) < _KEPT and agent.exposed.lists(target):
                self._functions[named] = function
        return self._result(function, args, kwargs)

    def _result(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return result if not is_async(function) else _future(result, function)

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
                self._agent.office.send(asked.peer, REPLY, asked.number, (value,), asked.context)
            except CommError:
                # The caller has left, or does not receive.
                pass
            except Exception as refused:
                return self._fail(asked, refused)
        self._done(asked)

    def _fail(self, asked: _Request, error: BaseException) -> None:
        told = packed(error)
        # The traceback as text: records may be kept, and must not keep what is in its frames.
        _log.warning("a call by rank %d failed on rank %d:\n%s", asked.peer, self._agent.rank, told[3])
        if asked.kind == REMOTE:
            assert asked.outcome is not None
            asked.outcome.settle(None, error)
        else:
            with contextlib.suppress(CommError):
                self._agent.office.send(asked.peer, ERROR, asked.number, (told,))
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
