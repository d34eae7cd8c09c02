"""Conversion of call values to bytes and bodies, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from unisono.core.mailbox import Envelope
from unisono.rpc.message import MessageReader, MessageWriter
from unisono.rpc.protocol import HEADER, NO_CONTEXT
from unisono.rpc.value_codecs import install, put_pickled
from unisono.serialization.format import MAX_DEPTH, UnsendableError, decoders, encoders, write

if TYPE_CHECKING:
    from unisono.rpc.agent import Agent

__all__ = ["CallTypeError", "pack", "unpack"]

install()


class CallTypeError(TypeError, RuntimeError):
    """Raised for a value of a type that calls do not support. Also a RuntimeError, as in torch's RPC."""


def pack(
    agent: Agent, peer: int, kind: int, number: int, context: int, values: Sequence[object]
) -> tuple[bytes, list[torch.Tensor], list[Callable[[], None]]]:
    """Return head and bodies of a message with some values, and the actions that undo it if it is not sent.

    Raises:
        CallTypeError: One of them cannot be sent; says which and why.
    """
    parts = MessageWriter(agent, peer, context)
    parts.append(b"")
    try:
        if agent.exposed.trusted:
            for value in values:
                _put(parts, value, MAX_DEPTH)
        else:
            for value in values:
                (encoders.get(type(value)) or write)(parts, value, MAX_DEPTH)
        message = agent.contexts.send(context, peer, parts.recorded) if parts.recorded else 0
    except BaseException as error:
        for action in parts.undo:
            action()
        if isinstance(error, UnsendableError):
            place = "".join(reversed(error.path))
            raise CallTypeError(
                f"the value{place} is {error.what}: calls carry plain values, containers, dataclasses, tensors, RRefs "
                "and exposed functions; pass trusted=True to rpc.init on every rank to pickle other values"
            ) from None
        raise
    if context != NO_CONTEXT:
        agent.contexts.met(context, peer)
    parts[0] = HEADER.pack(kind, number, context, message)
    return b"".join(parts), parts.bodies, parts.undo


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


def unpack(agent: Agent, mail: Envelope, context: int, message: int, at: int, count: int) -> list[Any]:
    """Return the values of a message from an offset to its end. Raises ValueError for malformed bytes."""
    content, peer = mail.head, mail.peer
    if count == 1 and content[at:] == b"N":
        return [None]
    view = MessageReader(content)
    view.agent, view.peer, view.bodies, view.context, view.message = agent, peer, mail.bodies, context, message
    view.tensors, view.refused = 0, None
    values = []
    try:
        for _ in range(count):
            value, at = decoders[view[at]](view, at + 1, MAX_DEPTH)
            values.append(value)
        if at != len(view):
            raise ValueError(f"{len(view) - at} bytes follow its end")
    except IndexError:
        raise ValueError(f"rank {peer} sent a call that ends too early") from None
    except (Exception, SystemExit) as error:
        # A pickle may even raise an exit, which must not end the thread that receives.
        raise ValueError(f"what rank {peer} sent cannot be read here: {error}") from error
    if view.refused is not None:
        raise view.refused
    return values
