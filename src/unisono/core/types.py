"""Basic types of all layers: messages, reduce operations, work in progress."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol, Required, TypedDict

if TYPE_CHECKING:
    import torch

__all__ = [
    "COLLECTIVE_TAG",
    "MAX_TAG",
    "Blocking",
    "CommunicatorLike",
    "Message",
    "NonBlocking",
    "PointToPoint",
    "Recv",
    "ReduceOp",
    "Send",
    "Timeout",
    "Work",
]

COLLECTIVE_TAG = -1
"""Tag of collectives. Users' tags start at 0, so the two never match."""

MAX_TAG = 2**24 - 1
"""Largest tag that a user may pass; every transport with tags supports it."""

Timeout = float | timedelta
"""A timeout argument: a number of seconds, or a `datetime.timedelta`; at most 1e9 s."""


class Blocking(TypedDict, total=False):
    """Keyword arguments of a collective that returns when it is done.

    Attributes:
        algorithm, async_op, timeout: See `Communicator.all_reduce`.

    Example:
        >>> Blocking(timeout=5.0)
        {'timeout': 5.0}
    """

    algorithm: str | None
    async_op: Literal[False]
    timeout: Timeout | None


class NonBlocking(TypedDict, total=False):
    """Keyword arguments of a collective that returns a `Work` immediately.

    Attributes:
        algorithm, async_op, timeout: See `Communicator.all_reduce`.

    Example:
        >>> NonBlocking(async_op=True)
        {'async_op': True}
    """

    algorithm: str | None
    async_op: Required[Literal[True]]
    timeout: Timeout | None


class ReduceOp(StrEnum):
    """Operation with which a reduction combines contributions. Methods that take a `ReduceOp` also accept its name.

    Example:
        >>> ReduceOp("sum") is ReduceOp.SUM
        True
    """

    SUM = "sum"
    AVG = "avg"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


@dataclass(frozen=True, slots=True, eq=False)
class _Endpoint:
    tensor: Any
    peer: int
    tag: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Send(_Endpoint):
    """A message to another rank, for `Communicator.batch_isend_irecv`.

    Args:
        tensor: Tensor or buffer, which must not be modified until the work is done. Transports get the data as a
            one-dimensional contiguous tensor.
        peer: Rank of the receiver.
        tag: See `Communicator.send`.

    Example:
        >>> un.Send(torch.ones(2), 1).peer
        1
    """


@dataclass(frozen=True, slots=True, eq=False)
class Recv(_Endpoint):
    """A message from another rank, for `Communicator.batch_isend_irecv`.

    Args:
        tensor: Tensor or buffer to write to, with the same dtype and length as the sent tensor. Transports get a
            one-dimensional contiguous tensor to write to.
        peer: Rank of the sender.
        tag: See `Communicator.recv`.

    Example:
        >>> un.Recv(torch.empty(2), 1, tag=7).tag
        7
    """


Message = Send | Recv


class Work(ABC):
    """Handle of an operation in flight, returned by every transport and every asynchronous operation.

    Example:
        >>> def program(comm):
        ...     t = torch.ones(2)
        ...     work = comm.all_reduce(t, async_op=True)
        ...     work.wait_received(), work.wait()
        ...     done = work.get_future().done()
        ...     return t.tolist(), done, work.is_completed(), work.exception(), work.source_rank(), work.cancel()
        >>> un.launch(program, nprocs=2, backend="thread")[0]
        ([2.0, 2.0], True, True, None, -1, False)
    """

    @abstractmethod
    def wait(self, timeout: Timeout | None = None) -> None:
        """Wait until the operation is done; raise its error if it failed.

        Args:
            timeout: Seconds, or a `timedelta`; the group's default if None.

        Raises:
            CommTimeoutError: The operation did not finish in time. You may wait again.
        """

    def wait_received(self, timeout: Timeout | None = None) -> None:
        """Wait until all receives have completed; sends may still be in flight. By default, calls `wait`.

        Args:
            timeout: See `wait`.
        """
        self.wait(timeout)

    @abstractmethod
    def is_completed(self) -> bool:
        """Return whether the work has finished, with or without an error. Never blocks."""

    @abstractmethod
    def exception(self) -> BaseException | None:
        """Return the work's error if it has failed; None otherwise."""

    @abstractmethod
    def get_future(self) -> torch.futures.Future[None]:
        """Return a future that completes when the work does, without further calls from the caller."""

    def source_rank(self) -> int:
        """Return the sender of the received message; -1 while the sender is unknown, or if this is not a receive."""
        return -1

    def cancel(self) -> bool:
        """Cancel the operation if this kind of work can be cancelled; by default, it can't.

        Returns: Whether the operation was cancelled.
        """
        return False


class PointToPoint(Protocol):
    """Interface through which an algorithm exchanges messages.

    Messages with the same tag from one rank to another arrive in posting order. Nothing else is guaranteed: a send may
    block until it is received.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def post(self, batch: Sequence[Message]) -> Work:
        """Start all messages of a batch in one call. No message in the batch waits for another."""
        ...


class CommunicatorLike(Protocol):
    """The part of a communicator that `comm.equal_tensors`, `comm.slow_rank` and `comm.tracing` use.

    They are below `Communicator`, which they therefore cannot import.
    """

    _engine: Any

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def backend(self) -> str: ...
    @property
    def device(self) -> torch.device: ...
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, /) -> Any: ...
    def all_reduce(self, tensor: torch.Tensor, op: Any, /) -> Any: ...
    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None: ...
    def broadcast_object(self, obj: Any, src: int = 0) -> Any: ...
