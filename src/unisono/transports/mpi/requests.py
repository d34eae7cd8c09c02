"""A single message as a sequence of MPI requests."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from unisono.core.tensors import view_of
from unisono.core.types import Message, Recv, Send
from unisono.core.work import elements, size_error
from unisono.transports.mpi.communicators import MpiCommunicators

__all__ = [
    "ENVELOPE_BYTES",
    "INLINE_BYTES",
    "LONGEST",
    "MessageRequest",
    "envelope_of",
    "memory",
    "name_of",
    "opened",
    "post_direct",
    "post_recv",
    "post_send",
]

LONGEST = 1 << 30
"""Largest number of bytes or elements in one MPI call, because many MPI libraries count in 32 bits."""

_HEADER = struct.Struct("<qq24s")
"""Header of an envelope: number of elements in the message, number of the message, and name of the dtype."""

ENVELOPE_BYTES = 4096
INLINE_BYTES = ENVELOPE_BYTES - _HEADER.size


def memory(comms: MpiCommunicators, tensor: torch.Tensor, start: int = 0, nbytes: int | None = None) -> Any:
    """Return bytes of a tensor's memory as an MPI buffer, without copying."""
    return comms.mpi.buffer.fromaddress(tensor.data_ptr() + start, tensor.nbytes if nbytes is None else nbytes)


class MessageRequest:
    """A message in flight, and its MPI requests.

    Args:
        message: The posted message.
        held: Memory that must not be freed before the requests complete.
        steps: Function that takes `requests`, and returns an iterator. Each step of the iterator appends requests, and
            the next step follows once they are done.

    Attributes:
        message: The posted message.
        requests: Requests in flight, in the order in which they complete.
        held: Memory that must not be freed before the requests complete.
    """

    def __init__(self, message: Message, held: object, steps: Callable[[list[Any]], Iterator[None]]) -> None:
        self.message = message
        self.held = held
        self.requests: list[Any] = []
        self._steps = steps(self.requests)

    def start(self) -> None:
        """Post the first requests."""
        next(self._steps)

    def move(self) -> bool:
        """Make progress. Return whether the message is done.

        Raises MismatchError if the message does not fit its receive.
        """
        while True:
            while self.requests:
                if not self.requests[0].Test():
                    return False
                del self.requests[0]
            try:
                next(self._steps)
            except StopIteration:
                return True


def post_direct(comms: MpiCommunicators, message: Message, requests: list[Any]) -> Iterator[None]:
    """Send or receive a message of a collective, whose length both ranks know."""
    start = comms.own.Irecv if isinstance(message, Recv) else comms.own.Isend
    for part, nbytes in _cut(comms, message.tensor):
        requests.append(start(part, message.peer, nbytes % comms.largest_tag))
    yield


def envelope_of(message: Send, number: int) -> bytes:
    """Return the envelope of a user's message, which contains the content if that is short."""
    tensor = message.tensor
    header = _HEADER.pack(tensor.numel(), number, name_of(tensor.dtype))
    return header + bytes(view_of(tensor)) if 0 < tensor.nbytes <= INLINE_BYTES else header


def post_send(
    comms: MpiCommunicators, message: Send, envelope: bytes, number: int, requests: list[Any]
) -> Iterator[None]:
    """Send a user's message: an envelope, and a separate body if the content is long."""
    send = comms.users.Isend
    requests.append(send([envelope, comms.mpi.BYTE], message.peer, 2 * message.tag))
    if message.tensor.nbytes > INLINE_BYTES:
        for part, _ in _cut(comms, message.tensor):
            requests.append(send(part, message.peer, 2 * number + 1))
    yield


def post_recv(comms: MpiCommunicators, message: Recv, envelope: bytearray, requests: list[Any]) -> Iterator[None]:
    """Receive a user's message: the envelope, and then the body if the content is long."""
    receive = comms.users.Irecv
    requests.append(receive([envelope, comms.mpi.BYTE], message.peer, 2 * message.tag))
    yield
    tensor = message.tensor
    number = opened(comms, envelope, message)
    if tensor.nbytes <= INLINE_BYTES:
        content = bytes(memoryview(envelope)[_HEADER.size : _HEADER.size + tensor.nbytes])
        ctypes.memmove(tensor.data_ptr(), content, tensor.nbytes)
        return
    for part, _ in _cut(comms, tensor):
        requests.append(receive(part, message.peer, 2 * number + 1))
    yield


def opened(comms: MpiCommunicators, envelope: bytearray, message: Message) -> int:
    """Return the message number in an envelope. Raises MismatchError if the message does not fit the receive."""
    tensor = message.tensor
    peer = message.peer
    numel, number, name = _HEADER.unpack_from(envelope)
    if numel != tensor.numel() or name.rstrip(b"\0") != name_of(tensor.dtype):
        sent = elements(numel, name.rstrip(b"\0").decode())
        expected = elements(tensor.numel(), str(tensor.dtype))
        raise size_error(peer, sent, comms.own.Get_rank(), expected, message.tag, peer)
    return int(number)


@cache
def name_of(dtype: torch.dtype) -> bytes:
    """Return the name of a dtype, without "torch."."""
    return str(dtype).removeprefix("torch.").encode()


def _cut(comms: MpiCommunicators, tensor: torch.Tensor) -> Iterator[tuple[list[Any], int]]:
    """Yield a tensor's memory in blocks of at most 1 GiB; yields one empty block for an empty tensor."""
    total = tensor.nbytes
    for at in range(0, total, LONGEST) if total else (0,):
        nbytes = min(LONGEST, total - at)
        yield [memory(comms, tensor, at, nbytes), comms.mpi.BYTE], nbytes
