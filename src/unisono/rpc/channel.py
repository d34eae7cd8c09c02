"""An agent's message channel: converts values to bytes and back, and sends messages in order."""

from __future__ import annotations

import contextlib
import io
import pickle
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from unisono import serialization
from unisono.core.transport import Envelope, Mailbox
from unisono.errors import CommError, CommTimeoutError
from unisono.rpc.context import Peers
from unisono.rpc.dispatcher import Dispatcher
from unisono.rpc.exported import ExportTable, NotExposedError, name_of
from unisono.rpc.protocol import EXIT, HEADER, NO_CONTEXT
from unisono.rpc.rref import RRefContext
from unisono.rpc.workers import Workers
from unisono.serialization import tensors
from unisono.serialization.builtins import put_items, take_items
from unisono.serialization.format import (
    MAX_DEPTH,
    Encoder,
    Parts,
    UnsendableError,
    View,
    add_decoders,
    decoders,
    encoders,
    finders,
    head,
    put_text,
    read,
    take_bytes,
    take_text,
    write,
)
from unisono.serialization.functions import FunctionPickler

__all__ = [
    "SEND_S",
    "CallTypeError",
    "MessageChannel",
    "MessageReader",
    "MessageWriter",
    "control_message",
    "put_pickled",
    "rollback",
    "words_of",
]

SEND_S = 60.0
"""Timeout in seconds for sending a message to a rank whose buffer is full."""
_BYE_S = 0.5


class CallTypeError(TypeError, RuntimeError):
    """Raised for a value whose type remote calls do not support. As in torch's RPC, this is also a RuntimeError."""


class MessageChannel:
    """Writes, sends and reads one rank's messages.

    Args:
        agent: The agent that uses this channel.
        box: Mailbox that transports the messages.
        exposed: Functions exposed on this rank.
        dispatcher: Dispatcher of the messages that this rank sends to itself.
        workers: Threads that run the tasks for messages that this rank sends to itself.

    Attributes:
        agent: The agent that uses this channel.
        references: References of this rank, set when they exist: they send messages on this channel.
    """

    references: RRefContext

    def __init__(
        self, agent: Peers, box: Mailbox, exposed: ExportTable, dispatcher: Dispatcher, workers: Workers
    ) -> None:
        _install()
        self.agent = agent
        self.box = box
        self.rank: int = box.group.rank
        self.exposed = exposed
        self._dispatcher = dispatcher
        self._workers = workers
        self._outbox: deque[tuple[int, bytes]] = deque()
        self._posting = threading.Lock()

    # -- values ------------------------------------------------------------------------------------
    def pack(
        self, peer: int, head: tuple[int, int, int], values: Sequence[object], call: bytes = b"", positional: int = 0
    ) -> tuple[bytes, list[torch.Tensor], list[Callable[[], None]]]:
        """Return the head and bodies of a message that contains `values`, and actions to run if it is not sent.

        Args:
            peer: Receiver.
            head: Kind, number, and autograd context.
            values: Values to put into the message.
            call: Header of a call.
            positional: Number of values that are positional arguments of a call, for error messages.

        Raises:
            CallTypeError: One of the values cannot be sent; the error says which and why.
        """
        kind, number, context = head
        parts = MessageWriter((b"", call))
        message = 0
        index = 0
        parts.channel = self
        parts.peer = peer
        parts.context = context
        parts.bodies = []
        parts.recorded = []
        parts.undo = []
        try:
            for index, value in enumerate(values):  # noqa: B007
                put = _put if self.exposed.trusted else encoders.get(type(value)) or write
                put(parts, value, MAX_DEPTH)
            if context != NO_CONTEXT:
                message = self.agent.contexts.send(context, peer, parts.recorded)
        except BaseException as error:
            rollback(parts.undo)
            if isinstance(error, UnsendableError):
                path = "".join(reversed([*error.path, *([f"[{index}]"] if index < positional else [])]))
                raise CallTypeError(
                    f"the value{path} is {error.kind}: calls carry plain values, containers, dataclasses, tensors, "
                    "RRefs and exposed functions; pass trusted=True to rpc.init on every rank to pickle other values"
                ) from None
            raise
        parts[0] = HEADER.pack(kind, number, context, message)
        return b"".join(parts), parts.bodies, parts.undo

    def unpack(self, envelope: Envelope, at: int) -> list[Any]:
        """Return the values of a message from an offset to its end. Raises ValueError for malformed bytes."""
        view = MessageReader(envelope.head)
        values = list[Any]()
        _, _, view.context, view.message = HEADER.unpack_from(view)
        view.channel = self
        view.envelope = envelope
        view.tensors = 0
        view.refused = None
        try:
            while at < len(view):
                value, at = decoders[view[at]](view, at + 1, MAX_DEPTH)
                values.append(value)
            if at != len(view):
                raise IndexError
        except IndexError:
            raise ValueError(f"rank {envelope.peer} sent a call that ends too early") from None
        except (Exception, SystemExit) as error:
            # A pickle may even raise SystemExit, which must not end the receiving thread.
            raise ValueError(f"what rank {envelope.peer} sent cannot be read here: {error}") from error
        if view.refused is not None:
            raise view.refused
        return values

    # -- sending -----------------------------------------------------------------------------------
    def send(self, peer: int, head: tuple[int, int, int], values: Sequence[object]) -> None:
        """Send a reply."""
        content, bodies, undo = self.pack(peer, head, values)
        self.post(peer, content, bodies, SEND_S, undo)

    def may_arrive(self, peer: int, error: BaseException) -> bool:
        """Return whether a message may arrive although `post` failed: after a timeout, unless the receiver is lost."""
        return isinstance(error, CommTimeoutError) and peer not in self.box.lost

    def post(
        self,
        peer: int,
        content: bytes,
        bodies: Sequence[torch.Tensor],
        timeout: float,
        undo: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Send a message, or run the actions in `undo` if it cannot arrive.

        Messages from this rank to itself are handled by another thread.
        """
        try:
            if peer != self.rank:
                self.box.send(peer, content, bodies, timeout)
            else:
                found = self._dispatcher.dispatch(Envelope(peer, content, [body.clone() for body in bodies]))
                if found is not None:
                    # Run the task in another thread, even if it is short: it may wait for a lock that this thread
                    # already holds.
                    self._workers.run(found[0])
        except BaseException as error:
            # Roll back even on an interrupt: references that were not sent would otherwise remain counted forever.
            if not self.may_arrive(peer, error):
                rollback(undo)
            raise

    def send_control(self, peer: int, kind: int, *words: int) -> None:
        """Send a few numbers, in order, unless the rank is gone. In the polling thread, only queue the numbers."""
        self._outbox.append((peer, control_message(kind, words)))
        if not self._dispatcher.polling:
            self.empty_outbox()

    def empty_outbox(self) -> None:
        """Send queued messages, unless another thread is already doing this, and release freed objects."""
        while self._outbox and self._posting.acquire(blocking=False):
            try:
                self._empty()
            finally:
                self._posting.release()
        self.references.collect_freed()

    def _empty(self) -> None:
        while self._outbox:
            peer, content = self._outbox.popleft()
            # Ignore errors, because a rank that is gone needs no message.
            with contextlib.suppress(CommError):
                self.post(peer, content, (), SEND_S)

    def announce_exit(self, peers: Iterable[int], reason: str) -> None:
        """Notify other ranks that this rank has stopped serving."""
        for peer in peers:
            if peer != self.rank:
                with contextlib.suppress(CommError):
                    self.box.send(peer, control_message(EXIT, (reason,)), (), _BYE_S)


def control_message(kind: int, words: tuple[object, ...]) -> bytes:
    """Return a message with a few plain values."""
    return HEADER.pack(kind, 0, NO_CONTEXT, 0) + serialization.encode(words)


def words_of(envelope: Envelope) -> Any:
    """Return the plain values of a control message. Raises ValueError for malformed bytes."""
    return serialization.decode(envelope.head[HEADER.size :])


def rollback(undo: Sequence[Callable[[], None]]) -> None:
    """Undo the preparation of a message that is not going to be sent."""
    for action in undo:
        action()


def _put(parts: MessageWriter, value: object, depth: int) -> None:
    """Append a value, pickled if necessary."""
    marks = len(parts), len(parts.bodies), len(parts.recorded), len(parts.undo)
    put = encoders.get(type(value)) or write
    try:
        put(parts, value, depth)
    except UnsendableError:
        # If a part needs pickle, the whole value is pickled.
        for items, mark in zip((parts, parts.bodies, parts.recorded), marks, strict=False):
            del items[mark:]
        while len(parts.undo) > marks[3]:
            parts.undo.pop()()
        put_pickled(parts, value, depth)


class MessageWriter(list[Any]):
    """A message being written: its encoded parts, and the state of the encoding.

    Attributes:
        channel, peer: Channel of the sender, and rank of the receiver.
        bodies: Tensors sent separately.
        context: Autograd context, or `NO_CONTEXT`.
        recorded: Tensors through which gradients flow back.
        undo: Actions to run if the message is not sent.
    """

    __slots__ = ("bodies", "channel", "context", "peer", "recorded", "undo")

    channel: MessageChannel
    peer: int
    context: int
    bodies: list[torch.Tensor]
    recorded: list[torch.Tensor]
    undo: list[Callable[[], None]]


class MessageReader(bytes):
    """A received message: its bytes, and the state of the decoding.

    Attributes:
        channel: Channel of the receiver.
        envelope: The message as received: its sender, and tensors received separately.
        context, message: Autograd context, and the number of the message in it.
        tensors: Number of tensors received separately that have been read.
        refused: Error if a function in the message is not exposed on this rank; raised only after the whole message has
            been read, because references later in the message must be counted.
    """

    channel: MessageChannel
    envelope: Envelope
    context: int
    message: int
    tensors: int
    refused: Exception | None


_INLINE_BYTES = 8192
"""A tensor of up to this many bytes is copied into the message's head; a larger tensor is sent as a separate body."""
_MOST_BODIES = 200

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, type)


# -- tensors ---------------------------------------------------------------------------------------
def _find(cls: type[Any]) -> Encoder | None:
    """Return the encoder for a type in remote calls. Elsewhere, tensors are encoded with the default encoder."""
    if issubclass(cls, torch.Tensor):
        return _put_tensor
    if issubclass(cls, _FUNCTIONS):
        return _put_function
    return _put_reference if hasattr(cls, "__unisono_reference__") else None


def _put_tensor(parts: Parts, tensor: torch.Tensor, depth: int) -> None:
    if not isinstance(parts, MessageWriter):
        return tensors.put_tensor(parts, tensor, depth)
    if parts.context != NO_CONTEXT and tensor.requires_grad and torch.is_grad_enabled():
        tensor = tensor.cpu()
        parts.append(b"g")
        parts.recorded.append(tensor)
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.detach()
        parts.append(b"z" + head("t", 4)[1:])
        content = [tensor.is_coalesced(), list(tensor.shape), tensor._indices(), tensor._values()]
        return put_items(parts, content, depth)
    problem = tensors.why_not_dense(tensor)
    if problem is not None:
        raise UnsendableError(problem)
    order = None if tensor.is_contiguous() else _order(tensor)
    if order is not None:
        parts.append(b"o" + head("t", len(order))[1:])
        put_items(parts, order, depth)
        tensor = tensor.detach().permute(order)
    if tensor.nbytes <= _INLINE_BYTES or len(parts.bodies) >= _MOST_BODIES:
        return tensors.put_dense(parts, tensor)
    dense = tensor.detach()
    if not (dense.is_contiguous() and dense.is_cpu) or dense.is_conj() or dense.is_neg():
        dense = dense.resolve_conj().resolve_neg().cpu().contiguous()
    parts.append(b"a")
    put_text(parts, str(dense.dtype).removeprefix("torch."))
    tensors.put_shape(parts, dense.shape)
    parts.bodies.append(dense.reshape(-1).view(torch.uint8))


def _order(tensor: torch.Tensor) -> list[int] | None:
    """Return the dimensions in order of decreasing stride; None if the tensor is not dense in that order."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return order if tensor.detach().permute(order).is_contiguous() else None


def _take_ordered(view: View, at: int, depth: int) -> tuple[torch.Tensor, int]:
    order, at = take_items(view, at, depth)
    tensor, at = read(view, at, depth - 1)
    if not isinstance(tensor, torch.Tensor) or sorted(order) != list(range(tensor.dim())):
        raise ValueError("a dimension order was sent without its tensor")
    return tensor.permute([order.index(dimension) for dimension in range(len(order))]), at


def _take_sparse(view: View, at: int, depth: int) -> tuple[torch.Tensor, int]:
    (coalesced, shape, indices, values), at = take_items(view, at, depth)
    known = True if coalesced else None
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True, is_coalesced=known), at


def _take_aside(view: View, at: int, _depth: int) -> tuple[torch.Tensor, int]:
    name, at = take_text(view, at + 1)
    dtype = vars(torch).get(name)
    shape, at = tensors.take_shape(view, at)
    if not isinstance(dtype, torch.dtype) or not isinstance(view, MessageReader):
        raise ValueError(f"a tensor of {name!r} was sent")
    body = view.envelope.bodies[view.tensors]
    view.tensors += 1
    # Convert the bytes of a bool to 0 or 1, because torch's operations disagree about other values.
    return (body.ne(0) if dtype == torch.bool else body.view(dtype)).reshape(shape), at


def _take_recorded(view: View, at: int, depth: int) -> tuple[torch.Tensor, int]:
    tensor, at = read(view, at, depth)
    if not isinstance(view, MessageReader) or not isinstance(tensor, torch.Tensor):
        raise ValueError("a recorded value is not a tensor")
    return view.channel.agent.contexts.receive(view.context, view.envelope.peer, view.message, tensor), at


# -- functions and classes -------------------------------------------------------------------------
def _put_function(parts: Parts, target: Any, depth: int) -> None:
    if not isinstance(parts, MessageWriter):
        raise UnsendableError(f"the {type(target).__name__} {getattr(target, '__qualname__', target)}")
    try:
        name = name_of(target)
    except TypeError:
        name = ""
    if parts.channel.exposed.trusted and not parts.channel.exposed.finds(name, target):
        return put_pickled(parts, target, depth)
    if not name:
        raise UnsendableError(f"{target!r}, which has no name by which another rank could find it")
    parts.append(b"q")
    put_text(parts, name)


def _take_function(view: View, at: int, _depth: int) -> tuple[Any, int]:
    name, at = take_text(view, at + 1)
    if not isinstance(view, MessageReader):
        raise ValueError(f"the function {name} was sent")
    try:
        return view.channel.exposed.function(name), at
    except NotExposedError:
        view.refused = NotExposedError(
            f"rank {view.envelope.peer} sent {name.replace(':', '.')} as a value, which is not exposed on rank "
            f"{view.channel.rank}: put @unisono.rpc.expose above it in the code of every rank, name it in "
            "rpc.init(..., expose=[...]), or pass trusted=True to rpc.init on the rank that receives it"
        )
        return None, at


# -- references ------------------------------------------------------------------------------------
def _put_reference(parts: Parts, reference: Any, depth: int) -> None:
    if not isinstance(parts, MessageWriter):
        raise UnsendableError("an RRef, which only calls carry")
    parts.append(b"r")
    put_items(parts, parts.channel.references.pass_on(reference, parts.peer, parts.undo), depth)


def _take_reference(view: View, at: int, depth: int) -> tuple[Any, int]:
    words = []
    for _ in range(4):
        word, at = read(view, at, depth)
        words.append(word)
    if not isinstance(view, MessageReader) or not all(type(word) is int for word in words):
        raise ValueError("a malformed reference")
    return view.channel.references.accept(view.envelope.peer, *words), at


# -- any object, among ranks that trust each other -------------------------------------------------
class _CallPickler(FunctionPickler):
    """Pickler that leaves references and supported tensors to the encoders for remote calls."""

    def __init__(self, file: io.BytesIO, parts: MessageWriter) -> None:
        super().__init__(file)
        self._parts = parts
        self.values: list[object] = []

    def persistent_id(self, value: object) -> int | None:
        apart = type(value) is torch.Tensor and (
            value.layout == torch.sparse_coo or tensors.why_not_dense(value) is None
        )
        if apart or hasattr(type(value), "__unisono_reference__"):
            self.values.append(value)
            return len(self.values) - 1
        return None


class _CallUnpickler(pickle.Unpickler):
    def __init__(self, content: bytes, values: list[object]) -> None:
        super().__init__(io.BytesIO(content))
        self._values = values

    def persistent_load(self, number: int) -> object:
        return self._values[number]


def put_pickled(parts: Parts, value: Any, depth: int) -> None:
    """Append a value of any type, pickled."""
    assert isinstance(parts, MessageWriter)
    file = io.BytesIO()
    pickler = _CallPickler(file, parts)
    try:
        pickler.dump(value)
    except Exception as error:
        raise UnsendableError(f"a {type(value).__qualname__}, which cannot be pickled ({error})") from error
    content = file.getvalue()
    parts.append(b"k")
    write(parts, pickler.values, depth - 1)
    parts.append(head("b", len(content))[1:])
    parts.append(content)


def _take_pickled(view: View, at: int, depth: int) -> tuple[Any, int]:
    if not isinstance(view, MessageReader) or not view.channel.exposed.trusted:
        raise ValueError(
            "a pickled value was sent, which is accepted only after rpc.init(..., trusted=True) on this rank"
        )
    values, at = read(view, at, depth - 1)
    content, at = take_bytes(view, at)
    return _CallUnpickler(bytes(content), values).load(), at


def _install() -> None:
    """Register the encoders and decoders for remote calls in `unisono.serialization`. Idempotent."""
    if _find not in finders:
        finders.insert(0, _find)
        # Register the most frequent class directly, because `_find` is slower.
        encoders[torch.Tensor] = _put_tensor
        add_decoders(
            {
                "a": _take_aside,
                "o": _take_ordered,
                "r": _take_reference,
                "q": _take_function,
                "k": _take_pickled,
                "g": _take_recorded,
                "z": _take_sparse,
            }
        )
