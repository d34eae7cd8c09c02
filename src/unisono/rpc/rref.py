"""References to objects of other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from unisono.core.types import Timeout
from unisono.errors import PeerLostError
from unisono.rpc.context import current_agent
from unisono.rpc.pending_calls import CallFuture
from unisono.rpc.protocol import WorkerInfo
from unisono.rpc.refcount import Key
from unisono.rpc.rref_context import RRefContext
from unisono.rpc.value_codecs import register_reference

__all__ = ["RRef"]

T = TypeVar("T")


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
        references = cast(RRefContext, current_agent().references)
        self._bind(references, references.rank, references.own(value))

    def _bind(self, references: RRefContext, owner: int, key: Key, confirmation: CallFuture | None = None) -> None:
        self._references, self._owner, self._key, self._confirmation = references, owner, key, confirmation
        self.lost = False

    def owner(self) -> WorkerInfo:
        """Return the name and rank of the owner."""
        return self._references.infos[self._owner]

    def owner_name(self) -> str:
        """Return the name of the owner."""
        return self._references.infos[self._owner].name

    def is_owner(self) -> bool:
        """Return whether the object is on this rank."""
        return self._owner == self._references.rank

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
            return cast(T, self._references.wait(self._key, timeout))
        self._check()
        return cast(T, self._references.client.call(self._owner, "@fetch", self._key, (), None, timeout))

    def local_value(self) -> T:
        """Return the object itself, on its owner. Waits until it exists.

        Raises:
            RuntimeError: This rank is not the owner.
        """
        if not self.is_owner():
            raise RuntimeError(f"only the owner, {self.owner_name()!r}, has the object: use to_here() for a copy")
        return cast(T, self._references.wait(self._key, None))

    def rpc_sync(self, timeout: Timeout | None = None) -> Any:
        """Return a proxy that runs methods on the object's owner and waits for them: `ref.rpc_sync().step(3)`.

        Args:
            timeout: Limit of each call: seconds or a `timedelta`; the agent's if None.
        """
        return _Proxy(self, self._references.client.call, timeout)

    def rpc_async(self, timeout: Timeout | None = None) -> Any:
        """Return a proxy like `rpc_sync`, with methods that return futures.

        Args:
            timeout: Limit of each call: seconds or a `timedelta`; the agent's if None.
        """
        return _Proxy(self, self._references.client.start, timeout)

    def remote(self, timeout: Timeout | None = None) -> Any:
        """Return a proxy like `rpc_sync`, with methods that return references to their results.

        Args:
            timeout: Limit of each call: seconds or a `timedelta`; the agent's if None.
        """
        return _Proxy(self, self._references.client.make, timeout)

    def backward(self, context: int, retain_graph: bool = False) -> None:
        """Back-propagate from the object, a tensor of one element, within a context of distributed autograd.

        Args:
            context: Number of the context in which it was computed.
            retain_graph: Keep the graph for another pass.

        Raises:
            RuntimeError: The graph is gone, because an earlier pass did not retain it.
            CommError: There is no such context.
        """
        self._references.backward(self, context, retain_graph)

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
        self._rref, self._call, self._timeout = rref, call, timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            rref = self._rref
            rref._check()
            return self._call(rref._owner, f".{name}", rref._key, args, kwargs, self._timeout)

        return method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__getattr__("__call__")(*args, **kwargs)


register_reference(RRef)
