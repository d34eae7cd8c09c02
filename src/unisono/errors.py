"""Exceptions of communication between ranks; messages name the rank, the call, the time waited, and the fix."""

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

    The code that raises it passes the fields it knows; the layers above add where it happened with
    :meth:`locate`, and the text is formatted only when it is read.

    Attributes:
        rank, size, group: The rank that raised, and the size and name of its group.
        operation, call: The operation's name and its number in the group, counted from 1.
        peer: The rank of the same group that caused it, if there is one.
        nbytes: Bytes of the message in question.
        waited_s: Seconds waited before giving up.

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
        self.rank, self.size, self.group, self.operation, self.call = rank, size, group, operation, call
        self.peer, self.nbytes, self.waited_s = peer, nbytes, waited_s

    def locate(self, **known: Any) -> Self:
        """Fill in fields that are still unset, and return the error itself."""
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
        if where and self.group is not None:
            where[-1] += f" of {self.group}"
        said = f"{self._beginning}{self.message}"
        return f"{', '.join(where)}: {said}" if where else said

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, {name: getattr(self, name) for name in _FIELDS})


def _rebuild(kind: type[CommError], message: str, fields: dict[str, Any]) -> CommError:
    return kind(message, **fields)


class CommTimeoutError(CommError, TimeoutError):
    """A wait ended at its timeout; the message names the missing ranks."""

    # As programs look for it that were written for torch.
    _beginning = "timed out: "


class PeerLostError(CommError, ConnectionError):
    """Another rank died, left, or failed by an exception of its own."""


class MismatchError(CommError, ValueError):
    """Ranks called different operations, or the same one with arguments that do not fit together."""


class CorruptedError(CommError):
    """A received message differs from the message that was sent."""


class NotFiniteError(CommError, ArithmeticError):
    """A rank holds a NaN or an infinity instead of a finite number; the message names the rank and the place."""


class DeadlockError(CommTimeoutError):
    """A wait ended at its timeout, and ranks wait for each other in a cycle; the message names them."""


class AbortedError(CommError):
    """The communicator was aborted on purpose, by this rank or another."""


class ClosedError(CommError):
    """The communicator was closed before this call."""


class UnavailableError(CommError, ImportError):
    """A backend, a device or an optional package is unavailable here; the message says how to get it."""
