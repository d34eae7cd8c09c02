"""Message channel of an agent: values to bytes and back, and sending them in order."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from unisono import serialization
from unisono.core.transport import Envelope, Mailbox
from unisono.errors import CommError, CommTimeoutError
from unisono.rpc.exported import ExportTable
from unisono.rpc.message import MessageReader, MessageWriter, Recorder, ReferenceTable
from unisono.rpc.protocol import EXIT, HEADER, NO_CONTEXT
from unisono.rpc.receiver import Receiver, Task
from unisono.rpc.value_codecs import install, put_pickled
from unisono.serialization.format import MAX_DEPTH, UnsendableError, decoders, encoders, write

__all__ = ["SEND_S", "CallTypeError", "Channel", "control_message", "rollback", "words_of"]

SEND_S = 60.0
"""Seconds to wait for a rank to make room for a message."""
_BYE_S = 0.5

install()


class CallTypeError(TypeError, RuntimeError):
    """Raised for a value of a type that calls do not support. Also a RuntimeError, as in torch's RPC."""


class Channel:
    """Writes, sends and reads the messages of one rank.

    Args:
        box: Mailbox that carries them.
        exposed: Functions of this rank.
        receiver: Dispatches messages that this rank sends to itself.
        aside: Runs a task in another thread.

    Attributes:
        references, recorder: Set by the agent and by autograd before the first message.
    """

    references: ReferenceTable
    recorder: Recorder

    def __init__(self, box: Mailbox, exposed: ExportTable, receiver: Receiver, aside: Callable[[Task], None]) -> None:
        self.box, self.rank, self.exposed = box, box.group.rank, exposed
        self._receiver, self._aside = receiver, aside
        self._outbox: deque[tuple[int, bytes]] = deque()
        self._posting = threading.Lock()

    # -- values ------------------------------------------------------------------------------------
    def pack(
        self, peer: int, head: tuple[int, int, int], values: Sequence[object], call: bytes = b"", positional: int = 0
    ) -> tuple[bytes, list[torch.Tensor], list[Callable[[], None]]]:
        """Return head and bodies of a message with some values, and the actions that undo it if it is not sent.

        Args:
            peer: Receiver.
            head: Kind, number, and autograd context.
            values: What the message carries.
            call: Header of a call.
            positional: How many of the values are positional arguments of a call, for the text of an error.

        Raises:
            CallTypeError: One of them cannot be sent; says which and why.
        """
        kind, number, context = head
        parts, message, index = MessageWriter((b"", call)), 0, 0
        parts.endpoint, parts.peer, parts.context = self, peer, context
        parts.bodies, parts.recorded, parts.undo = [], [], []
        try:
            for index, value in enumerate(values):  # noqa: B007
                put = _put if self.exposed.trusted else encoders.get(type(value)) or write
                put(parts, value, MAX_DEPTH)
            if parts.recorded:
                message = self.recorder.send(context, peer, parts.recorded)
        except BaseException as error:
            rollback(parts.undo)
            if isinstance(error, UnsendableError):
                path = "".join(reversed([*error.path, *([f"[{index}]"] if index < positional else [])]))
                raise CallTypeError(
                    f"the value{path} is {error.kind}: calls carry plain values, containers, dataclasses, tensors, "
                    "RRefs and exposed functions; pass trusted=True to rpc.init on every rank to pickle other values"
                ) from None
            raise
        if context != NO_CONTEXT:
            self.recorder.met(context, peer)
        parts[0] = HEADER.pack(kind, number, context, message)
        return b"".join(parts), parts.bodies, parts.undo

    def unpack(self, envelope: Envelope, at: int) -> list[Any]:
        """Return the values of a message from an offset to its end. Raises ValueError for malformed bytes."""
        view, values = MessageReader(envelope.head), list[Any]()
        _, _, view.context, view.message = HEADER.unpack_from(view)
        view.endpoint, view.peer, view.bodies, view.tensors, view.refused = (
            self,
            envelope.peer,
            envelope.bodies,
            0,
            None,
        )
        try:
            while at < len(view):
                value, at = decoders[view[at]](view, at + 1, MAX_DEPTH)
                values.append(value)
            if at != len(view):
                raise IndexError
        except IndexError:
            raise ValueError(f"rank {envelope.peer} sent a call that ends too early") from None
        except (Exception, SystemExit) as error:
            # A pickle may even raise an exit, which must not end the thread that receives.
            raise ValueError(f"what rank {envelope.peer} sent cannot be read here: {error}") from error
        if view.refused is not None:
            raise view.refused
        return values

    # -- sending -----------------------------------------------------------------------------------
    def send(self, peer: int, head: tuple[int, int, int], values: Sequence[object]) -> None:
        """Send an answer."""
        content, bodies, undo = self.pack(peer, head, values)
        try:
            self.post(peer, content, bodies, SEND_S)
        except BaseException as error:
            # Also on an interrupt: references that were not sent would stay counted permanently.
            if not self.may_arrive(peer, error):
                rollback(undo)
            raise

    def may_arrive(self, peer: int, error: BaseException) -> bool:
        """Return whether the message may arrive despite an error in `post`, because its receiver is only slow."""
        return isinstance(error, CommTimeoutError) and peer not in self.box.lost

    def post(self, peer: int, content: bytes, bodies: Sequence[torch.Tensor], timeout: float) -> None:
        """Send a message; a message of this rank to itself is served by another thread."""
        if peer != self.rank:
            self.box.send(peer, content, bodies, timeout)
            return
        found = self._receiver.dispatch(Envelope(peer, content, [body.clone() for body in bodies]))
        if found is not None:
            self._aside(found[0])

    def send_control(self, peer: int, kind: int, *words: int) -> None:
        """Send a few numbers, in order; nothing if the rank is gone. During a dispatch they are sent soon after."""
        self._outbox.append((peer, control_message(kind, words)))
        if not self._receiver.dispatching:
            self.empty_outbox()

    def empty_outbox(self) -> None:
        """Send queued messages, unless another thread is doing so, and release freed objects."""
        while self._outbox and self._posting.acquire(blocking=False):
            try:
                self._empty()
            finally:
                self._posting.release()
        self.references.collect_freed()

    def _empty(self) -> None:
        while self._outbox:
            peer, content = self._outbox.popleft()
            # Nothing is sent to a rank that is gone.
            with contextlib.suppress(CommError):
                self.post(peer, content, (), SEND_S)

    def announce_exit(self, peers: Iterable[int], reason: str) -> None:
        """Notify other ranks that this rank has stopped serving."""
        for peer in peers:
            if peer != self.rank:
                with contextlib.suppress(CommError):
                    self.box.send(peer, control_message(EXIT, (reason,)), (), _BYE_S)


def control_message(kind: int, words: tuple[object, ...]) -> bytes:
    """Return a message of a few plain values."""
    return HEADER.pack(kind, 0, NO_CONTEXT, 0) + serialization.encode(words)


def words_of(envelope: Envelope) -> Any:
    """Return the plain values of such a message. Raises ValueError for malformed bytes."""
    return serialization.decode(envelope.head[HEADER.size :])


def rollback(undo: Sequence[Callable[[], None]]) -> None:
    """Undo the preparation of a message that is not sent."""
    for action in undo:
        action()


def _put(parts: MessageWriter, value: object, depth: int) -> None:
    """Append a value, by pickle if that is needed."""
    marks = len(parts), len(parts.bodies), len(parts.recorded), len(parts.undo)
    try:
        write(parts, value, depth)
    except UnsendableError:
        # Part of it needs pickle: then all of it is pickled.
        for items, mark in zip((parts, parts.bodies, parts.recorded), marks, strict=False):
            del items[mark:]
        while len(parts.undo) > marks[3]:
            parts.undo.pop()()
        put_pickled(parts, value, depth)
