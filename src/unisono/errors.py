"""Exceptions for communication between ranks; messages name the rank, the call, the time waited, and the fix."""

from __future__ import annotations

from typing import Any, Self

__all__ = [
    "AbortedError",
    "ClosedError",
    "CommError",
    "CommTimeoutError",
    "CorruptedError",
    "DeadlockError",
    "MismatchError",
    "NotFiniteError",
    "PeerLostError",
    "UnavailableError",
]

_FIELDS = ("rank", "size", "group", "operation", "call", "peer", "nbytes", "waited_s")


class CommError(RuntimeError):
    """Base class of the library's errors: a failure of communication between ranks.

    The code that raises an error passes the fields that it knows; higher layers add the location with :meth:`locate`.
    The text is formatted only when it is read.

    Args:
        message: The text without the location.
        rank, size, group: The rank that raised the error, the size of its group, and a description of that group.
        operation, call: The operation's name and its number in the group, counted from 1.
        peer: The rank in the same group that caused the error, if there is one.
        nbytes: Size of the message in bytes.
        waited_s: Seconds waited before giving up.

    Attributes:
        message, rank, size, group, operation, call, peer, nbytes, waited_s: The arguments; None if unknown.

    Example:
        >>> print(CommError("nobody answered", rank=2, size=8, operation="all_reduce", call=17))
        rank 2 of 8, all_reduce #17: nobody answered
    """

    _beginning = ""

    def __init__(
        self,
        message: str = "",
        *,
        rank: int | None = None,
        size: int | None = None,
        group: str | None = None,
        operation: str | None = None,
        call: int | None = None,
        peer: int | None = None,
        nbytes: int | None = None,
        waited_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.size = size
        self.group = group
        self.operation = operation
        self.call = call
        self.peer = peer
        self.nbytes = nbytes
        self.waited_s = waited_s

    def locate(self, **known: Any) -> Self:
        """Fill in attributes that are still unset.

        Args:
            known: Values by attribute name.

        Returns: The error itself.

        Example:
            >>> print(CommError("nobody answered", rank=2).locate(rank=0, size=8, operation="barrier"))
            rank 2 of 8, barrier: nobody answered
        """
        for name, value in known.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        return self

    def __str__(self) -> str:
        where = []
        if self.rank is not None:
            where.append(f"rank {self.rank} of {self.size}" if self.size is not None else f"rank {self.rank}")
        if self.operation is not None:
            where.append(f"{self.operation} #{self.call}" if self.call is not None else self.operation)
        if self.operation is not None and self.group is not None:
            where[-1] += f" of {self.group}"
        described = f"{self._beginning}{self.message}"
        return f"{', '.join(where)}: {described}" if where else described

    def __reduce__(self) -> tuple[Any, ...]:
        notes = {"__notes__": self.__notes__} if hasattr(self, "__notes__") else None
        return _rebuild, (type(self), self.message, {name: getattr(self, name) for name in _FIELDS}), notes


def _rebuild(kind: type[CommError], message: str, fields: dict[str, Any]) -> CommError:
    return kind(message, **fields)


class CommTimeoutError(CommError, TimeoutError):
    """A wait timed out; the message names the missing ranks.

    Example:
        >>> import time
        >>> un.simulate(lambda comm: comm.barrier(timeout=1.0) if comm.rank == 0 else time.sleep(5), 2)
        Traceback (most recent call last):
        ...
        unisono.errors.CommTimeoutError: rank 0 of 2, barrier #1 of world: timed out: ...rank 1...
    """

    # Keep these words: programs written for torch search error messages for "timed out".
    _beginning = "timed out: "


class PeerLostError(CommError, ConnectionError):
    """Another rank died, left, or failed with an exception.

    Example:
        >>> def program(comm):
        ...     if comm.rank == 1:
        ...         raise KeyError("no such sample")
        ...     comm.barrier()
        >>> lost, failed = un.launch(program, 2, "thread", on_failure="continue")
        >>> isinstance(lost, un.errors.PeerLostError), lost.peer, failed
        (True, 1, KeyError('no such sample'))
    """


class MismatchError(CommError, ValueError):
    """Ranks called different operations, or the same operation with incompatible arguments.

    Example:
        >>> un.launch(lambda comm: comm.all_reduce(torch.ones(1 + comm.rank)), 2, "thread")
        Traceback (most recent call last):
        ...
        unisono.errors.MismatchError: rank ... of 2, all_reduce #1 of world: ranks differ in counts: ...
    """


class CorruptedError(CommError):
    """A received message differs from the message that was sent."""


class NotFiniteError(CommError, ArithmeticError):
    """A rank has a NaN or an infinity instead of a finite number; the message names the rank and the tensor.

    Example:
        >>> un.launch(lambda comm: un.gradients.assert_finite([torch.tensor([1.0, 0.0]).log()], comm), 2, "thread")
        Traceback (most recent call last):
        ...
        unisono.errors.NotFiniteError: ...
    """


class DeadlockError(CommTimeoutError):
    """A wait timed out, and ranks wait for each other in a cycle; the message names them.

    Example:
        >>> un.simulate(lambda comm: comm.recv(torch.zeros(1), src=1 - comm.rank), 2)
        Traceback (most recent call last):
        ...
        unisono.errors.DeadlockError: rank ... of 2, recv ...
    """


class AbortedError(CommError):
    """The communicator was aborted on purpose, by this rank or another.

    Example:
        >>> def program(comm):
        ...     comm.abort("no more data") if comm.rank == 0 else comm.barrier()
        >>> un.launch(program, 2, "thread")
        Traceback (most recent call last):
        ...
        unisono.errors.AbortedError: rank 1 of 2, barrier... of world: rank 0 aborted the communicator: no more data
    """


class ClosedError(CommError):
    """The communicator was closed before this call.

    Example:
        >>> comm = un.init()
        >>> comm.close()
        >>> comm.barrier()
        Traceback (most recent call last):
        ...
        unisono.errors.ClosedError: rank 0 of 1, barrier ...: the communicator is closed...
    """


class UnavailableError(CommError, ImportError):
    """A backend, a device or an optional package is unavailable here; the message says how to get it."""
