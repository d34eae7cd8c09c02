"""Point-to-point messages, on a channel of their own: they never match a collective's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from unisono.calls.caller import Caller
from unisono.engine import Engine
from unisono.errors import CommError, CommTimeoutError
from unisono.tensors import check_apart
from unisono.types import MAX_TAG, Message, Recv, Send, Work
from unisono.wrappers.trace import traced

__all__ = ["Messages"]


class Messages(Caller):
    """send, recv and their relatives."""

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0, *, timeout: float | None = None) -> None:
        """Send a tensor to rank `dst`; return when it may be changed again.

        Do not count on buffering: two ranks that both send before they receive may wait for each
        other for ever. `sendrecv` does both at once.

        Args:
            tensor: Any shape, strides and dtype. The receiver's has as many elements, of the same dtype.
            dst: Another rank.
            tag: 0 to 2**24 - 1; messages match by tag, and of one tag in order.
            timeout: Seconds; the communicator's if None.

        Raises:
            CommTimeoutError: Nobody received in time. The communicator is broken then.
            MismatchError: The receiver expects something else.

        Example:
            >>> def program(comm):
            ...     t = torch.full((2,), 7.0) if comm.rank == 0 else torch.zeros(2)
            ...     comm.send(t, dst=1) if comm.rank == 0 else comm.recv(t, src=0)
            ...     return t.tolist()
            >>> un.launch(program, nprocs=2, backend="thread")
            [[7.0, 7.0], [7.0, 7.0]]
        """
        self._post("send", [Send(tensor, dst, tag)]).wait_or_break(timeout)

    def recv(self, tensor: torch.Tensor, src: int, tag: int = 0, *, timeout: float | None = None) -> int:
        """Receive a tensor from rank `src` in place, and return `src`. Otherwise as `send`."""
        self._post("recv", [Recv(tensor, src, tag)]).wait_or_break(timeout)
        return src

    def isend(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Work:
        """Start to send. The tensor must not change until the work's `wait` has returned."""
        return self._post("isend", [Send(tensor, dst, tag)])

    def irecv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> Work:
        """Start to receive. The tensor holds the message when the work's `wait` has returned."""
        return self._post("irecv", [Recv(tensor, src, tag)])

    def sendrecv(
        self,
        sent: torch.Tensor,
        dst: int,
        received: torch.Tensor,
        src: int,
        *,
        sendtag: int = 0,
        recvtag: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Send one tensor and receive another at the same time; cannot deadlock in a ring of ranks."""
        check_apart([("the tensor received", received)], [("the tensor sent", sent)])
        self._post("sendrecv", [Recv(received, src, recvtag), Send(sent, dst, sendtag)]).wait_or_break(timeout)

    def batch_isend_irecv(self, messages: Sequence[Message]) -> list[Work]:
        """Start many messages at once (`unisono.types.Send` and `Recv`); one work for all of them.

        The list of one is what torch's function of the same name returns with nccl.
        """
        if not messages or not all(isinstance(m, Send | Recv) for m in messages):
            raise TypeError("batch_isend_irecv needs a list of unisono.types.Send and Recv, at least one")
        return [self._post("batch_isend_irecv", messages)]

    def _post(self, operation: str, messages: Sequence[Message]) -> _Posted:
        self._enter(operation)
        staging, flat = self._staging(), list[Message]()
        for message in messages:
            receives = isinstance(message, Recv)
            name = "src" if receives else "dst"
            self._check_rank(message.peer, name, other=True)
            self._check_tag(message.tag)
            self._check_tensor(message.tensor, "the tensor", written=receives)
            buffer = staging.target(message.tensor) if receives else staging.source(message.tensor)
            flat.append(type(message)(buffer, message.peer, message.tag))
        with torch.no_grad():
            for action in staging.before:
                action()
            return _Posted(self._engine, operation, traced(self._engine.transport).post(flat), staging.after)

    def _check_tag(self, tag: int) -> None:
        if not isinstance(tag, int) or isinstance(tag, bool):
            raise TypeError(f"tag must be an int, not {type(tag).__name__}")
        if not 0 <= tag <= MAX_TAG:
            raise ValueError(f"tag={tag} is out of range; tags are 0 to {MAX_TAG}")
        if tag and not self._engine.transport.tags:
            raise ValueError(f"this backend has no tags: messages match in order. Use tag=0, not {tag}")


class _Posted(Work):
    """A transport's work, with errors that say where they belong, and what is left to do at the end."""

    def __init__(self, engine: Engine, operation: str, inner: Work, after: list[Callable[[], object]]) -> None:
        self._engine, self._operation, self._inner, self._after = engine, operation, inner, after
        self._lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> None:
        if timeout is None:
            return self.wait_or_break(None)
        try:
            self._inner.wait(timeout)
        except CommTimeoutError as error:
            # The message may still come: a wait that was told its time breaks nothing.
            raise self._located(error) from None
        except CommError as error:
            raise self._failed(error) from error
        self._finish()

    def wait_or_break(self, timeout: float | None) -> None:
        """Wait; any failure, a timeout too, breaks the communicator."""
        try:
            self._inner.wait(self._engine.options.timeout_s if timeout is None else timeout)
        except BaseException as error:
            told = self._failed(error)
            if told is error:
                raise
            raise told from error
        self._finish()

    def is_completed(self) -> bool:
        if not self._inner.is_completed():
            return False
        if self._inner.exception() is None:
            self._finish()
        return True

    def exception(self) -> BaseException | None:
        error = self._inner.exception()
        return self._failed(error) if error is not None else None

    def get_future(self) -> torch.futures.Future[None]:
        future: torch.futures.Future[None] = torch.futures.Future()

        def settle(inner: torch.futures.Future[None]) -> None:
            try:
                inner.value()
            except Exception as error:
                future.set_exception(self._failed(error))  # type: ignore[arg-type]
            else:
                self._finish()
                future.set_result(None)

        self._inner.get_future().add_done_callback(settle)
        return future

    def _finish(self) -> None:
        with self._lock, torch.no_grad():
            while self._after:
                self._after.pop(0)()

    def _failed(self, error: BaseException) -> BaseException:
        return self._engine.failed(error, self._operation)

    def _located(self, error: CommError) -> CommError:
        return error.locate(rank=self._engine.group.rank, size=self._engine.group.size, operation=self._operation)
