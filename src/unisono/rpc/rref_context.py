"""References of one agent, and the objects that it owns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

from unisono.core.types import Timeout
from unisono.core.work import resolve_timeout
from unisono.errors import CommError, CommTimeoutError, PeerLostError
from unisono.rpc.channel import Channel
from unisono.rpc.message import MessageWriter
from unisono.rpc.pending_calls import CallFuture
from unisono.rpc.protocol import WorkerInfo
from unisono.rpc.refcount import Key, References

__all__ = ["Calls", "OwnedValue", "RRefContext"]


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
            self.value, self.error, self.known = value, error, True
            self.trace = error.__traceback__ if error is not None else None
            callbacks, self._callbacks = self._callbacks, []
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
        self.rank, self.infos, self.wake = channel.rank, infos, channel.box.wake
        self._timeout_s, self._not_counted, self._kind = timeout_s, not_counted, kind
        self._protocol = References(self.rank, channel.send_control, OwnedValue)
        self.arrived, self.dropped = self._protocol.arrived, self._protocol.dropped
        self.new_key, self.unused = self._protocol.new_key, self._protocol.unused

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
