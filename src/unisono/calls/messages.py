"""Point-to-point messages, on a channel of their own: they never match a collective's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from unisono.activity import Awaited, Noted
from unisono.calls.caller import Caller
from unisono.calls.vouched import vouch
from unisono.engine import Engine
from unisono.errors import CommError, CommTimeoutError
from unisono.failing import explained
from unisono.site import call_site
from unisono.tensors import check_apart
from unisono.types import MAX_TAG, Message, Recv, Send, Work
from unisono.work import patience, readable
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
        if not self._engine.carried("send", tensor, dst, tag, timeout):
            patience(timeout, 0.0)
            self._post("send", [Send(tensor, dst, tag)]).wait_or_break(timeout)

    def recv(self, tensor: torch.Tensor, src: int, tag: int = 0, *, timeout: float | None = None) -> int:
        """Receive a tensor from rank `src` in place, and return `src`. Otherwise as `send`."""
        if not self._engine.carried("recv", tensor, src, tag, timeout):
            patience(timeout, 0.0)
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
        patience(timeout, 0.0)
        self._check_tensor(received, "the tensor received", written=True)
        self._check_tensor(sent, "the tensor sent")
        check_apart([("the tensor received", received)], [("the tensor sent", sent)])
        self._post("sendrecv", [Recv(received, src, recvtag), Send(sent, dst, sendtag)]).wait_or_break(timeout)

    def batch_isend_irecv(self, messages: Sequence[Message]) -> list[Work]:
        """Start many messages at once (`unisono.types.Send` and `Recv`); one work for all of them.

        The list of one is what torch's function of the same name returns with nccl.
        """
        messages = list(messages)
        if not messages or not all(isinstance(m, Send | Recv) for m in messages):
            raise TypeError("batch_isend_irecv needs a list of unisono.types.Send and Recv, at least one")
        return [self._post("batch_isend_irecv", messages)]

    def _post(self, operation: str, messages: Sequence[Message]) -> _Posted:
        self._enter(operation)
        staging, flat, activity = self._staging(), list[Message](), self._engine.activity
        for message in messages:
            receives = isinstance(message, Recv)
            name = "src" if receives else "dst"
            self._check_rank(message.peer, name, other=True)
            self._check_tag(message.tag)
            self._check_tensor(message.tensor, "the tensor", written=receives)
            buffer = staging.target(message.tensor) if receives else staging.source(message.tensor)
            flat.append(type(message)(buffer, message.peer, message.tag))
        noted = operation, None, _detail(flat), call_site()
        activity.note(noted)
        awaited = tuple(activity.post("recv" if isinstance(m, Recv) else "send", m.peer, m.tag) for m in flat)
        with torch.no_grad():
            for action in staging.before:
                action()
            if self._check == "full":
                staging.after[:0] = vouch(self._engine, flat)
            work = traced(self._engine.transport).post(flat)
        return _Posted(self._engine, noted, awaited, work, staging.after)

    def _check_tag(self, tag: int) -> None:
        if not isinstance(tag, int) or isinstance(tag, bool):
            raise TypeError(f"tag must be an int, not {type(tag).__name__}")
        if not 0 <= tag <= MAX_TAG:
            raise ValueError(f"tag={tag} is out of range; tags are 0 to {MAX_TAG}")
        if tag and not self._engine.transport.tags:
            raise ValueError(f"this backend has no tags: messages match in order. Use tag=0, not {tag}")


def _detail(messages: Sequence[Message]) -> str:
    """What messages these are, in a few words."""
    first, more = messages[0], len(messages) - 1
    way = f"{'from' if isinstance(first, Recv) else 'to'} rank {first.peer}"
    tag = f", tag {first.tag}" if first.tag else ""
    return f"{way}{tag}, {readable(first.tensor.nbytes)}{f', and {more} more' if more else ''}"


class _Posted(Work):
    """A transport's work, with errors that say where they belong, and what is left to do at the end."""

    def __init__(
        self, engine: Engine, noted: Noted, awaited: tuple[Awaited, ...], inner: Work, after: list[Callable[[], object]]
    ) -> None:
        self._engine, self._noted, self._awaited, self._inner, self._after = engine, noted, awaited, inner, after
        # Messages are counted by themselves: each rank has its own number of them.
        self._operation, self._number = noted[0], engine.activity.messages
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def wait(self, timeout: float | None = None) -> None:
        if timeout is None:
            return self.wait_or_break(None)
        timeout = patience(timeout, timeout)
        with self._seen():
            try:
                self._inner.wait(timeout)
            except CommTimeoutError as error:
                # The message may still come: a wait that was told its time breaks nothing.
                raise self._located(explained(error, self._engine.control, self._engine.group)) from None
            except CommError as error:
                raise self._failed(error) from error
        self._finish()

    def wait_or_break(self, timeout: float | None) -> None:
        """Wait; any failure, a timeout too, breaks the communicator."""
        with self._seen():
            try:
                self._inner.wait(patience(timeout, self._engine.options.timeout_s))
            except BaseException as error:
                told = self._failed(error)
                if told is error:
                    raise
                raise told from error
        self._finish()

    @contextmanager
    def _seen(self) -> Iterator[None]:
        """Others can see for what this rank waits."""
        activity = self._engine.activity
        activity.enter(self._noted, self._awaited)
        try:
            yield
        finally:
            activity.leave()

    def is_completed(self) -> bool:
        if not self._inner.is_completed():
            return False
        if self._inner.exception() is None:
            # The next wait tells it.
            with suppress(CommError):
                self._finish()
        return True

    def exception(self) -> BaseException | None:
        error = self._inner.exception()
        return self._failed(error) if error is not None else self._error

    def get_future(self) -> torch.futures.Future[None]:
        future: torch.futures.Future[None] = torch.futures.Future()

        def settle(inner: torch.futures.Future[None]) -> None:
            try:
                inner.value()
                self._finish()
            except Exception as error:
                future.set_exception(self._failed(error))  # type: ignore[arg-type]
            else:
                future.set_result(None)

        self._inner.get_future().add_done_callback(settle)
        return future

    def _finish(self) -> None:
        with self._lock, torch.no_grad():
            try:
                while self._after:
                    self._after.pop(0)()
            except CommError as error:
                # Every later wait has to say how this one ended.
                self._after.clear()
                self._error = self._failed(error)
        if self._error is not None:
            raise self._error

    def _failed(self, error: BaseException) -> BaseException:
        return self._engine.failed(error, self._operation, self._number)

    def _located(self, error: BaseException) -> BaseException:
        assert isinstance(error, CommError)
        group = self._engine.group
        return error.locate(
            rank=group.rank, size=group.size, group=group.name, operation=self._operation, call=self._number
        )
