"""Point-to-point messages of a communicator: their checks, their works, and receives from any rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.collectives.arguments import check_rank
from unisono.comm.any_source import AnySource
from unisono.comm.engine import Engine
from unisono.comm.point_to_point_work import PointToPointWork
from unisono.core.flight_recorder import PendingMessage, Place, callers_place
from unisono.core.staging import Staging
from unisono.core.tensors import Buffer, check_tensor
from unisono.core.types import MAX_TAG, Message, Recv, Work
from unisono.core.work import Completion, format_bytes
from unisono.wrappers.trace import traced

__all__ = ["Messages"]


class Messages:
    """Point-to-point messages of one communicator, on a channel of their own: they never match a collective's.

    Args:
        engine: Of the communicator.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._any_source = engine, AnySource(engine)

    def post(self, operation: str, messages: Sequence[Message]) -> PointToPointWork:
        """Start messages in one call.

        Args:
            operation: Name of the method, for messages.
            messages: With the caller's buffers; at least one.
        """
        engine = self._engine
        engine.enter(operation)
        staging, flat = engine.staging(), list[Message]()
        for message in messages:
            receives = isinstance(message, Recv)
            name = "src" if receives else "dst"
            check_rank(message.peer, name, self._engine.group.size)
            self._check_tag(message.tag)
            tensor = check_tensor(message.tensor, "the tensor", engine.transport.devices, written=receives)
            buffer = staging.flat(tensor, read=not receives, write=receives)
            if receives and isinstance(message.tensor, list):
                staging.write_back(message.tensor, tensor)
            flat.append(type(message)(buffer, message.peer, message.tag))
        record = self._note(operation, flat)
        awaited, work = self._start(flat, staging)
        return PointToPointWork(self._engine, record, awaited, work, staging)

    def receive(self, operation: str, tensor: Buffer, src: int | None, tag: int) -> PointToPointWork:
        """Start a receive, from any rank if `src` is None.

        Args:
            operation: Name of the method, for messages.
            tensor, src, tag: As of `Communicator.recv`.
        """
        if src is not None:
            return self.post(operation, [Recv(tensor, src, tag)])
        self._engine.enter(operation)
        self._check_source(None, tag)
        found = check_tensor(tensor, "the tensor", self._engine.transport.devices, written=True)
        staging = self._engine.staging()
        buffer = staging.flat(found, read=False, write=True)
        if isinstance(tensor, list):
            staging.write_back(tensor, found)
        record = self._note(operation, [Recv(buffer, -1, tag)])
        work = self._any_source.join(tag, None, lambda peer: self._start([Recv(buffer, peer, tag)], staging)[1])
        return PointToPointWork(self._engine, record, (), work, staging)

    def _note(self, operation: str, messages: Sequence[Message]) -> tuple[str, None, str, Place]:
        """Keep a batch for reports; return what `Activity.enter` takes."""
        record = operation, None, _detail(messages), callers_place()
        self._engine.activity.note(*record)
        return record

    def _start(self, messages: Sequence[Message], staging: Staging) -> tuple[tuple[PendingMessage, ...], Work]:
        activity = self._engine.activity
        awaited = tuple(activity.post("recv" if isinstance(m, Recv) else "send", m.peer, m.tag) for m in messages)
        with torch.no_grad(), staging.entered():
            staging.begin()
            return awaited, traced(self._engine.transport, awaited).post(messages)

    def _check_source(self, src: int | None, tag: int) -> None:
        self._check_tag(tag)
        if not self._engine.transport.any_source:
            raise ValueError(
                "this backend cannot receive from any source: pass the sender's rank, as in recv(tensor, src=...)"
            )
        if src is not None:
            check_rank(src, "src", self._engine.group.size)

    def _check_tag(self, tag: int) -> None:
        if not isinstance(tag, int) or isinstance(tag, bool):
            raise TypeError(f"tag must be an int, not {type(tag).__name__}")
        if not 0 <= tag <= MAX_TAG:
            raise ValueError(f"tag={tag} is out of range; tags are 0 to {MAX_TAG}")
        if tag and not self._engine.transport.tags:
            raise ValueError(f"this backend has no tags: messages match in order. Use tag=0, not {tag}")

    def probe(self, operation: str, src: int | None, tag: int) -> PointToPointWork:
        """Return a work that ends when a message has arrived, from any rank if `src` is None.

        Args:
            operation: Name of the method, for messages.
            src, tag: As of `Communicator.probe`.
        """
        self._engine.enter(operation)
        self._check_source(src, tag)
        record = operation, None, f"tag {tag}", callers_place()
        return PointToPointWork(self._engine, record, (), self._any_source.join(tag, src, _done), Staging())


def _detail(messages: Sequence[Message]) -> str:
    """Return a short description of the messages."""
    first, more = messages[0], len(messages) - 1
    peer = f"rank {first.peer}" if first.peer >= 0 else "any rank"
    way = f"{'from' if isinstance(first, Recv) else 'to'} {peer}"
    tag = f", tag {first.tag}" if first.tag else ""
    return f"{way}{tag}, {format_bytes(first.tensor.nbytes)}{f', and {more} more' if more else ''}"


def _done(_peer: int) -> Work:
    """Return a completed work: a probed message needs no further action."""
    done = Completion(0.0)
    done.complete()
    return done
