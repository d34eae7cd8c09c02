"""References to objects of other ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from unisono.core.types import Timeout
from unisono.errors import CommError, PeerLostError
from unisono.rpc.context import current_agent
from unisono.rpc.message import MessageWriter
from unisono.rpc.refcount import Key
from unisono.rpc.value_codecs import register_reference

if TYPE_CHECKING:
    from unisono.rpc.agent import Agent, WorkerInfo
    from unisono.rpc.pending_calls import CallFuture

__all__ = ["OwnedValue", "RRef", "RRefContext"]

T = TypeVar("T")


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


class RRef(Generic[T]):
    """A reference to an object that stays on the rank that owns it.

    `remote` returns one immediately; `RRef(value)` creates one to a local object. References can be sent in
    arguments and results. The object is freed when the last reference anywhere is dropped, or its holder dies.

    Args:
        value: An object of this rank, which becomes its owner.

    Example:
        >>> @un.rpc.expose
        ... class Counter:
        ...     def __init__(self, start): self.n = start
        ...     def add(self, k): self.n += k; return self.n
        >>> def program(comm):
        ...     un.rpc.init(comm)
        ...     counter = un.rpc.remote(1, Counter, args=(10,)) if comm.rank == 0 else None
        ...     total = counter.rpc_sync().add(5) if counter else None
        ...     un.rpc.shutdown()
        ...     return total
        >>> un.launch(program, 2, "thread")
        [15, None]
    """

    __slots__ = ("__weakref__", "_agent", "_confirmation", "_key", "_owner", "gone")
    __unisono_reference__ = True

    def __init__(self, value: T) -> None:
        agent = current_agent()
        self._bind(agent, agent.rank, agent.references.own(value))

    def _bind(self, agent: Agent, owner: int, key: Key, confirmation: CallFuture | None = None) -> None:
        self._agent, self._owner, self._key, self._confirmation = agent, owner, key, confirmation
        self.gone = False

    def owner(self) -> WorkerInfo:
        """Return the name and rank of the owner."""
        return self._agent.infos[self._owner]

    def owner_name(self) -> str:
        """Return the name of the owner."""
        return self._agent.infos[self._owner].name

    def is_owner(self) -> bool:
        """Return whether the object is on this rank."""
        return self._owner == self._agent.rank

    def confirmed_by_owner(self) -> bool:
        """Return whether the owner is known to count this reference."""
        return self._confirmation is None or self._confirmation.done()

    def to_here(self, timeout: Timeout | None = None) -> T:
        """Return a copy of the object (the object itself on its owner). Waits until it exists.

        Args:
            timeout: Seconds or a `timedelta`; the agent's if None.

        Raises:
            Exception: Raised by the function that was to create it.
            PeerLostError: The owner has left, or the object was freed because all its holders had died.
        """
        if self.is_owner():
            return cast(T, self._agent.references.wait(self._key, timeout))
        self._check()
        return cast(T, self._agent.caller.call(self._owner, "@fetch", tuple(self._key), (), {}, timeout))

    def local_value(self) -> T:
        """Return the object itself, on its owner. Raises RuntimeError elsewhere."""
        if not self.is_owner():
            raise RuntimeError(f"only the owner, {self.owner_name()!r}, has the object: use to_here() for a copy")
        return cast(T, self._agent.references.wait(self._key, None))

    def rpc_sync(self, timeout: Timeout | None = None) -> Any:
        """Return a proxy that runs methods on the object's owner and waits for them: `ref.rpc_sync().step(3)`."""
        return _Proxy(self, self._agent.caller.call, timeout)

    def rpc_async(self, timeout: Timeout | None = None) -> Any:
        """Return a proxy like `rpc_sync`, with methods that return futures."""
        return _Proxy(self, self._agent.caller.start, timeout)

    def remote(self, timeout: Timeout | None = None) -> Any:
        """Return a proxy like `rpc_sync`, with methods that return references to their results."""
        return _Proxy(self, self._agent.caller.make, timeout)

    def backward(self, context: int, retain_graph: bool = False) -> None:
        """Back-propagate from the object, a tensor of one element, within a context of distributed autograd."""
        from unisono.rpc.autograd import backward
        from unisono.rpc.autograd.engine import backward_of

        if self.is_owner():
            backward(context, [cast(Any, self.local_value())], retain_graph=retain_graph)
        else:
            self._agent.rpc_sync(self._owner, backward_of, (context, self, retain_graph))

    def _check(self) -> None:
        if self.gone:
            raise PeerLostError(
                "the object was freed before its owner knew of this reference: the rank that passed it on has died",
                peer=self._owner,
            )

    def __del__(self) -> None:
        agent = getattr(self, "_agent", None)
        if agent is not None:
            agent.references.dropped(self._owner, self._key)
            agent.nudge()

    def __repr__(self) -> str:
        return f"<RRef {self._key.creator}.{self._key.number} owned by {self.owner_name()!r}>"

    def __reduce__(self) -> Any:
        raise TypeError("an RRef can be sent only as an argument or result of a call, where its references are counted")


class _Proxy:
    """Proxy for the methods of an object on another rank."""

    __slots__ = ("_call", "_rref", "_timeout")

    def __init__(self, rref: RRef[Any], call: Callable[..., Any], timeout: Timeout | None) -> None:
        self._rref, self._call, self._timeout = rref, call, timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            rref = self._rref
            rref._check()
            return self._call(rref._owner, f".{name}", tuple(rref._key), args, kwargs, self._timeout)

        return method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__getattr__("__call__")(*args, **kwargs)


class RRefContext:
    """References of one agent: the protocol of `refcount`, with `RRef`s for handles and `OwnedValue`s for values."""

    def __init__(self, agent: Agent) -> None:
        from unisono.rpc.refcount import References

        self._agent = agent
        self._protocol = References(agent.rank, agent.office.send_control, OwnedValue)
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

    def reference(self, owner: int, key: Key, confirmation: CallFuture | None = None) -> RRef[Any]:
        """Return a new reference, which has been counted already."""
        kind = self._agent.rref_class
        rref: RRef[Any] = kind.__new__(kind)
        rref._bind(self._agent, owner, key, confirmation)
        return rref

    def own(self, value: Any) -> Key:
        """Register an object of this rank; counts one reference."""
        key = self.new_key(self._agent.rank)
        self.expect(key, self._agent.rank).settle(value)
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
            self._agent.wait_known(outcome, timeout)
        if outcome.error is not None:
            # The same error is raised each time, so drop the traceback entries of earlier raises.
            raise outcome.error.with_traceback(outcome.trace)
        return outcome.value

    def pass_on(self, rref: RRef[Any], parts: MessageWriter) -> tuple[int, int, int, int]:
        """Prepare a reference for a rank; return the numbers to send."""
        if rref._agent is not self._agent:
            raise CommError("this RRef belongs to another agent, on another communicator")
        rref._check()
        token, undo = self._protocol.give(rref._owner, rref._key, rref, parts.peer)
        parts.undo.append(undo)
        return rref._owner, *rref._key, token

    def accept(self, passer: int, owner: int, creator: int, number: int, token: int) -> RRef[Any]:
        """Return the reference for received numbers."""
        if not 0 <= owner < self._agent.size or not 0 <= creator < self._agent.size:
            raise ValueError(f"an object names rank {owner} or {creator}, which does not exist")
        rref = self.reference(owner, Key(creator, number))
        self._protocol.take(passer, owner, rref._key, token, rref)
        return rref

    def lose(self, peer: int, error: BaseException) -> None:
        """Handle a lost rank."""
        for outcome in self._protocol.lose(peer):
            outcome.settle(None, error)


register_reference(RRef)
