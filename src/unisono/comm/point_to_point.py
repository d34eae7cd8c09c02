"""Point-to-point messages, on a channel of their own: they never match a collective's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from unisono.comm.any_source import AnySource
from unisono.comm.base import CommunicatorBase
from unisono.comm.message_digest import vouch
from unisono.comm.point_to_point_work import PointToPointWork
from unisono.core.buffers import Buffer
from unisono.core.call_site import call_site
from unisono.core.flight_recorder import CallRecord, PendingMessage
from unisono.core.staging import Staging
from unisono.core.tensors import check_apart
from unisono.core.types import MAX_TAG, Message, Recv, Send, Timeout, Work
from unisono.core.work import format_bytes, resolve_timeout
from unisono.wrappers.trace import traced

__all__ = ["PointToPointMixin"]


class PointToPointMixin(CommunicatorBase):
    """Point-to-point calls: send, recv and their variants."""

    def send(self, tensor: Buffer, dst: int, tag: int = 0, *, timeout: Timeout | None = None) -> None:
        """Send a tensor to rank `dst`; return when it may be changed again.

        Do not rely on buffering: two ranks that both send before they receive may deadlock.
        `sendrecv` does both in one call.

        Args:
            tensor: Any shape, strides and dtype. The receiver's has as many elements, of the same dtype.
            dst: The receiver's rank. A message to oneself needs a receive that is posted before, or an `isend`.
            tag: 0 to 2**24 - 1; messages match by tag, and in order within a tag.
            timeout: Seconds or a `timedelta`; the communicator's if None.

        Raises:
            CommTimeoutError: The message was not received in time. The communicator is broken then.
            MismatchError: The receiver expects something else.

        Example:
            >>> def program(comm):
            ...     t = torch.full((2,), 7.0) if comm.rank == 0 else torch.zeros(2)
            ...     comm.send(t, dst=1) if comm.rank == 0 else comm.recv(t, src=0)
            ...     return t.tolist()
            >>> un.launch(program, nprocs=2, backend="thread")
            [[7.0, 7.0], [7.0, 7.0]]
        """
        if self._engine.try_message("send", tensor, dst, tag, timeout):
            return
        resolve_timeout(timeout)
        self._post("send", [Send(tensor, dst, tag)]).wait_or_break(timeout)

    def recv(self, tensor: Buffer, src: int | None = None, tag: int = 0, *, timeout: Timeout | None = None) -> int:
        """Receive a tensor in place, and return the rank that sent it. Otherwise as `send`.

        Args:
            tensor: As for `send`.
            src: The sender's rank; any rank if None. Several ranks that have sent are served in turn.
            tag: As for `send`.
            timeout: As for `send`.

        Returns: The sender's rank.

        Raises:
            ValueError: `src` is None on a backend that cannot report which ranks have sent, such as nccl.

        Example:
            >>> def program(comm):
            ...     if comm.rank > 0:
            ...         return comm.send(torch.tensor([10 * comm.rank]), dst=0)
            ...     t = torch.zeros(1, dtype=torch.int64)
            ...     return sorted((comm.recv(t), t.item()) for _ in range(comm.size - 1))
            >>> un.launch(program, nprocs=3, backend="thread")[0]
            [(1, 10), (2, 20)]
        """
        if src is not None and self._engine.try_message("recv", tensor, src, tag, timeout):
            return src
        resolve_timeout(timeout)
        work = self._receive("recv", tensor, src, tag)
        work.wait_or_break(timeout)
        return work.source_rank()

    def isend(self, tensor: Buffer, dst: int, tag: int = 0) -> Work:
        """Start a send. The tensor must not change until the work's `wait` has returned.

        Args:
            tensor, dst, tag: As for `send`.

        Returns: The work in flight.

        Example:
            >>> def program(comm):
            ...     t = torch.full((2,), 7.0) if comm.rank == 0 else torch.zeros(2)
            ...     work = comm.isend(t, dst=1) if comm.rank == 0 else comm.irecv(t, src=0)
            ...     work.wait()
            ...     return t.tolist(), work.source_rank()
            >>> un.launch(program, nprocs=2, backend="thread")
            [([7.0, 7.0], -1), ([7.0, 7.0], 0)]
        """
        return self._post("isend", [Send(tensor, dst, tag)])

    def irecv(self, tensor: Buffer, src: int | None = None, tag: int = 0) -> Work:
        """Start a receive. The tensor holds the message when the work's `wait` has returned.

        From any rank if `src` is None; the work's `source_rank` is the sender then. Such receives match, in the
        order of calls, the messages from ranks that no other receive names.

        Args:
            tensor, src, tag: As for `recv`.

        Returns: The work in flight.
        """
        return self._receive("irecv", tensor, src, tag)

    def sendrecv(
        self,
        send_tensor: Buffer,
        dst: int,
        recv_tensor: Buffer,
        src: int,
        *,
        sendtag: int = 0,
        recvtag: int = 0,
        timeout: Timeout | None = None,
    ) -> None:
        """Send one tensor and receive another at the same time; cannot deadlock in a ring of ranks.

        Args:
            send_tensor, dst, sendtag: As for `send`.
            recv_tensor, src, recvtag: As for `recv`; memory that `send_tensor` does not use, and a rank, not None.
            timeout: As for `send`, for both messages.

        Example:
            >>> def program(comm):
            ...     mine, other = torch.tensor([comm.rank]), torch.zeros(1, dtype=torch.int64)
            ...     comm.sendrecv(mine, (comm.rank + 1) % comm.size, other, (comm.rank - 1) % comm.size)
            ...     return other.item()
            >>> un.launch(program, nprocs=3, backend="thread")
            [2, 0, 1]
        """
        resolve_timeout(timeout)
        written = self._check_tensor(recv_tensor, "recv_tensor", written=True)
        check_apart([("recv_tensor", written)], [("send_tensor", self._check_tensor(send_tensor, "send_tensor"))])
        self._post("sendrecv", [Recv(recv_tensor, src, recvtag), Send(send_tensor, dst, sendtag)]).wait_or_break(
            timeout
        )

    def batch_isend_irecv(self, messages: Sequence[Message]) -> list[Work]:
        """Start many messages in one call.

        Args:
            messages: `un.Send` and `un.Recv`, each with a tensor, a peer and a tag.

        Returns: A list of one work for all messages, as torch's function of the same name with nccl; an empty list
            if there are none.

        Raises:
            TypeError: An element is neither a `Send` nor a `Recv`.

        Example:
            >>> def program(comm):
            ...     mine, other = torch.tensor([comm.rank]), torch.zeros(1, dtype=torch.int64)
            ...     works = comm.batch_isend_irecv([un.Send(mine, 1 - comm.rank), un.Recv(other, 1 - comm.rank)])
            ...     for work in works:
            ...         work.wait()
            ...     return other.item()
            >>> un.launch(program, nprocs=2, backend="thread")
            [1, 0]
        """
        messages = list(messages)
        for message in messages:
            if not isinstance(message, Send | Recv):
                raise TypeError(
                    f"batch_isend_irecv takes unisono.Send and unisono.Recv, not {type(message).__name__}. "
                    "Pass a list such as [unisono.Send(tensor, dst), unisono.Recv(other, src)]"
                )
        return [self._post("batch_isend_irecv", messages)] if messages else []

    def _post(self, operation: str, messages: Sequence[Message]) -> PointToPointWork:
        self._engine.enter(operation)
        staging, flat = self._engine.staging(), list[Message]()
        for message in messages:
            receives = isinstance(message, Recv)
            name = "src" if receives else "dst"
            self._check_rank(message.peer, name)
            self._check_tag(message.tag)
            tensor = self._check_tensor(message.tensor, "the tensor", written=receives)
            buffer = staging.target(tensor) if receives else staging.source(tensor)
            if receives:
                staging.write_back(message.tensor, tensor)
            flat.append(type(message)(buffer, message.peer, message.tag))
        noted = self._note(operation, flat)
        awaited, work = self._start(flat, staging)
        return PointToPointWork(self._engine, noted, awaited, work, staging)

    def _receive(self, operation: str, tensor: Buffer, src: int | None, tag: int) -> PointToPointWork:
        if src is not None:
            return self._post(operation, [Recv(tensor, src, tag)])
        self._engine.enter(operation)
        self._check_source(None, tag)
        found = self._check_tensor(tensor, "the tensor", written=True)
        staging = self._engine.staging()
        buffer = staging.target(found)
        staging.write_back(tensor, found)
        noted = self._note(operation, [Recv(buffer, -1, tag)])
        work = self._any_source.join(tag, None, lambda peer: self._start([Recv(buffer, peer, tag)], staging)[1])
        return PointToPointWork(self._engine, noted, (), work, staging)

    @cached_property
    def _any_source(self) -> AnySource:
        return AnySource(self._engine)

    def _note(self, operation: str, messages: Sequence[Message]) -> CallRecord:
        noted = operation, None, _detail(messages), call_site()
        self._engine.activity.note(noted)
        return noted

    def _start(self, messages: Sequence[Message], staging: Staging) -> tuple[tuple[PendingMessage, ...], Work]:
        activity = self._engine.activity
        awaited = tuple(activity.post("recv" if isinstance(m, Recv) else "send", m.peer, m.tag) for m in messages)
        with torch.no_grad(), staging.order.entered():
            staging.begin()
            if self._check == "full":
                staging.after[:0] = vouch(self._engine, messages)
            return awaited, traced(self._engine.transport, awaited).post(messages)

    def _check_source(self, src: int | None, tag: int) -> None:
        self._check_tag(tag)
        if not self._engine.transport.any_source:
            raise ValueError(
                "this backend cannot receive from any source: pass the sender's rank, as in recv(tensor, src=...)"
            )
        if src is not None:
            self._check_rank(src, "src")

    def _check_tag(self, tag: int) -> None:
        if not isinstance(tag, int) or isinstance(tag, bool):
            raise TypeError(f"tag must be an int, not {type(tag).__name__}")
        if not 0 <= tag <= MAX_TAG:
            raise ValueError(f"tag={tag} is out of range; tags are 0 to {MAX_TAG}")
        if tag and not self._engine.transport.tags:
            raise ValueError(f"this backend has no tags: messages match in order. Use tag=0, not {tag}")


def _detail(messages: Sequence[Message]) -> str:
    """Return a short description of the messages."""
    first, more = messages[0], len(messages) - 1
    peer = f"rank {first.peer}" if first.peer >= 0 else "any rank"
    way = f"{'from' if isinstance(first, Recv) else 'to'} {peer}"
    tag = f", tag {first.tag}" if first.tag else ""
    return f"{way}{tag}, {format_bytes(first.tensor.nbytes)}{f', and {more} more' if more else ''}"
