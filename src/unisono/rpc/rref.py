"""References to objects that remain on their owner: a rank's own objects, and `RRef`, which other ranks use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

from unisono.core import clock
from unisono.core.transport import Mailbox
from unisono.core.types import Timeout
from unisono.core.work import resolve_timeout
from unisono.errors import CommError, CommTimeoutError, PeerLostError
from unisono.rpc.call_future import CallFuture
from unisono.rpc.context import Peers, current_agent
from unisono.rpc.protocol import WorkerInfo
from unisono.rpc.refcount import Key, References, Send
from unisono.rpc.workers import Workers

__all__ = ["OwnedValue", "RRef", "RRefContext"]

T = TypeVar("T")


class OwnedValue:
    """Outcome of creating an object: a value, or the error that prevented it."""

    __slots__ = ("_callbacks", "_lock", "error", "known", "trace", "value")

    def __init__(self) -> None:
        self.known: bool = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.trace: TracebackType | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def settle(self, value: Any, error: BaseException | None = None) -> None:
        """Set the outcome, unless it is already known."""
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
        """Call `callback` once the outcome is known, or immediately if the outcome is already known."""
        with self._lock:
            if not self.known:
                self._callbacks.append(callback)
                return
        callback()


class RRefContext(References):
    """One agent's references (`RRef`s) and its own objects (`OwnedValue`s), counted by the protocol of `refcount`.

    Args:
        agent: The agent, available to references as the attribute `agent`.
        box: Mailbox of this rank.
        send: Function that sends a message of a few numbers to a rank.
        timeout_s: Default timeout for waiting for an object, in seconds.
        workers: Threads that run functions; a function that waits for an object does not count as running.
        kind: Class of the references, such as `RRef`.
    """

    def __init__(
        self,
        agent: Peers,
        box: Mailbox,
        send: Send,
        timeout_s: float,
        workers: Workers,
        kind: type[Any],
    ) -> None:
        super().__init__(box.group.rank, send, OwnedValue)
        self.agent = agent
        self.wake: Callable[[], None] = box.wake
        self._timeout_s = timeout_s
        self._workers = workers
        self._kind = kind

    def flush(self) -> None:
        """Notify owners that this rank has dropped references."""
        super().flush()
        self.collect_freed()

    def collect_freed(self) -> None:
        """Release freed objects, whose finalizers may run any code."""
        while self.freed:
            self.freed.popleft()

    def reference(self, owner: int, key: Key, confirmation: CallFuture | None = None) -> Any:
        """Return a new reference, without changing any count."""
        rref = object.__new__(self._kind)
        rref._bind(self, owner, key, confirmation)
        return rref

    def own(self, value: Any) -> Key:
        """Register an object of this rank; counts one reference."""
        key = self.new_key(self.rank)
        self.expect(key, self.rank).settle(value)
        return key

    def expect(self, key: Key, holder: int) -> OwnedValue:
        """Return the `OwnedValue` of an object that is about to be created; counts one reference."""
        with self.lock:
            outcome: OwnedValue = self.ledger.make(key, holder)
        return outcome

    def outcome(self, key: Key) -> OwnedValue:
        """Return the `OwnedValue` of a referenced object. Raises PeerLostError if the object was freed."""
        with self.lock:
            outcome: OwnedValue | None = self.ledger.value(key)
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
            # The same error object is raised each time, so drop the traceback entries of earlier raises.
            raise outcome.error.with_traceback(outcome.trace)
        return outcome.value

    def _wait_known(self, outcome: OwnedValue, seconds: float) -> None:
        known = threading.Event()
        outcome.when_known(known.set)
        with self._workers.not_counted():
            if not clock.wait(known, clock.now() + seconds):
                raise CommTimeoutError(
                    f"waited {seconds:.1f} s for an object that is still being created", waited_s=seconds
                )

    def pass_on(self, rref: Any, peer: int, undo: list[Callable[[], None]]) -> tuple[int, int, int, int]:
        """Prepare to send a reference to a rank; return what to send: owner, creator, number and token."""
        if rref._references is not self:
            raise CommError("this RRef belongs to another agent, on another communicator")
        rref._check()
        token, revert = self.give(rref._owner, rref._key, rref, peer)
        undo.append(revert)
        return rref._owner, *rref._key, token

    def accept(self, passer: int, owner: int, creator: int, number: int, token: int) -> Any:
        """Return the reference that the received numbers identify."""
        if not 0 <= owner < len(self.agent.infos) or not 0 <= creator < len(self.agent.infos):
            raise ValueError(f"an object names rank {owner} or {creator}, which does not exist")
        key = Key(creator, number)
        rref = self.reference(owner, key)
        self.take(passer, owner, key, token, rref)
        return rref


class RRef(Generic[T]):
    """A reference to an object that remains on the rank that owns it.

    `remote` returns a reference immediately; `RRef(value)` creates a reference to a local object. References can be
    sent in arguments and results. The object is freed when the last reference on any rank is dropped, or when the rank
    that has the last reference dies.

    Args:
        value: A local object; this rank becomes its owner.

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
        >>> def local(comm):
        ...     un.rpc.init(comm)
        ...     ref = un.rpc.RRef([1, 2])
        ...     found = ref.to_here(), ref.local_value(), ref.is_owner(), ref.confirmed_by_owner()
        ...     count = ref.owner().id, ref.owner_name()
        ...     un.rpc.shutdown()
        ...     return *found, *count
        >>> un.launch(local, 1, "thread")
        [([1, 2], [1, 2], True, True, 0, 'rank0')]
    """

    __slots__ = ("__weakref__", "_confirmation", "_key", "_owner", "_references", "lost")
    __unisono_reference__ = True

    def __init__(self, value: T) -> None:
        references = current_agent().references
        assert isinstance(references, RRefContext)
        self._bind(references, references.rank, references.own(value))

    def _bind(self, references: RRefContext, owner: int, key: Key, confirmation: CallFuture | None = None) -> None:
        self._references = references
        self._owner = owner
        self._key = key
        self._confirmation = confirmation
        self.lost: bool = False

    def owner(self) -> WorkerInfo:
        """Return the name and rank of the owner."""
        return self._references.agent.infos[self._owner]

    def owner_name(self) -> str:
        """Return the name of the owner."""
        return self._references.agent.infos[self._owner].name

    def is_owner(self) -> bool:
        """Return whether the object is on this rank."""
        return self._owner == self._references.rank

    def confirmed_by_owner(self) -> bool:
        """Return whether the owner is known to have counted this reference."""
        return self._confirmation is None or self._confirmation.done()

    def to_here(self, timeout: Timeout | None = None) -> T:
        """Return a copy of the object (on its owner, the object itself). Waits until the object exists.

        Args:
            timeout: Seconds or a `timedelta`; the agent's timeout if None.

        Raises:
            Exception: The error of the function that should have created the object.
            PeerLostError: The owner has left, or the object was freed because all its holders had died.
        """
        if self.is_owner():
            return cast(T, self._references.wait(self._key, timeout))
        self._check()
        return cast(T, self._references.agent.client.call(self._owner, "@fetch", self._key, (), None, timeout))

    def local_value(self) -> T:
        """Return the object itself, if this rank is its owner. Waits until the object exists.

        Raises:
            RuntimeError: This rank is not the owner.
        """
        if not self.is_owner():
            raise RuntimeError(f"only the owner, {self.owner_name()!r}, has the object: use to_here() for a copy")
        return cast(T, self._references.wait(self._key, None))

    def rpc_sync(self, timeout: Timeout | None = None) -> Any:
        """Return a proxy whose methods run on the object's owner and block until they return: `ref.rpc_sync().step(3)`.

        Args:
            timeout: Time limit for each call: seconds or a `timedelta`; the agent's timeout if None.
        """
        return _Proxy(self, self._references.agent.client.call, timeout)

    def rpc_async(self, timeout: Timeout | None = None) -> Any:
        """Return a proxy whose methods run on the object's owner and return futures.

        Args:
            timeout: Time limit for each call: seconds or a `timedelta`; the agent's timeout if None.
        """
        return _Proxy(self, self._references.agent.client.start, timeout)

    def remote(self, timeout: Timeout | None = None) -> Any:
        """Return a proxy whose methods run on the object's owner and return references to their results.

        Args:
            timeout: Time limit for each call: seconds or a `timedelta`; the agent's timeout if None.
        """
        return _Proxy(self, self._references.agent.client.make, timeout)

    def backward(self, context: int, retain_graph: bool = False) -> None:
        """Back-propagate from the object, a one-element tensor, in a distributed autograd context.

        Args:
            context: ID of the context in which the tensor was computed.
            retain_graph: Whether to keep the graph for another backward pass.

        Raises:
            RuntimeError: The graph was freed by an earlier backward pass that did not retain it.
            CommError: The context does not exist.
        """
        self._references.agent.contexts.backward_from(self, context, retain_graph)

    def _check(self) -> None:
        if self.lost:
            raise PeerLostError(
                "the object was freed before its owner knew of this reference: the rank that passed it on has died",
                peer=self._owner,
            )

    def __del__(self) -> None:
        references = getattr(self, "_references", None)
        if references is not None:
            references.dropped(self._owner, self._key)
            references.wake()

    def __repr__(self) -> str:
        return f"<RRef {self._key.creator}.{self._key.number} owned by {self.owner_name()!r}>"

    def __reduce__(self) -> Any:
        raise TypeError("an RRef can be sent only as an argument or result of a call, where its references are counted")


class _Proxy:
    """Proxy for the methods of an object on another rank."""

    __slots__ = ("_call", "_rref", "_timeout")

    def __init__(self, rref: RRef[Any], call: Callable[..., Any], timeout: Timeout | None) -> None:
        self._rref = rref
        self._call = call
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            rref = self._rref
            rref._check()
            return self._call(rref._owner, f".{name}", rref._key, args, kwargs, self._timeout)

        return method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__getattr__("__call__")(*args, **kwargs)
