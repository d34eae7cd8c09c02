"""A single message as a sequence of MPI requests."""

from __future__ import annotations

import ctypes
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
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
    "DirectMessage",
    "MessageRequest",
    "RendezvousRecv",
    "RendezvousSend",
    "memory",
    "name_of",
    "opened",
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


class MessageRequest(ABC):
    """A message in flight, and its MPI requests.

    Attributes:
        message: The posted message.
        requests: Requests in flight, in the order in which they complete.
        held: Memory that must not be freed before the requests complete.
    """

    message: Message
    requests: list[Any]
    held: object

    @abstractmethod
    def start(self) -> None:
        """Post the first requests."""

    def move(self) -> bool:
        """Make progress. Return whether all requests are done. Raises the same errors as `arrived`."""
        while self.requests:
            if not self.requests[0].Test():
                return False
            del self.requests[0]
            self.arrived()
        return True

    def arrived(self) -> None:
        """Handle a completed request. Raises MismatchError if the message does not fit its receive."""


class DirectMessage(MessageRequest):
    """Message of a collective, whose length both ranks know."""

    def __init__(self, comms: MpiCommunicators, message: Message) -> None:
        self._comms = comms
        self.message = message
        self.requests: list[Any] = []
        self.held: object = message.tensor

    def start(self) -> None:
        start = self._comms.own.Irecv if isinstance(self.message, Recv) else self._comms.own.Isend
        for part, nbytes in _cut(self._comms, self.message.tensor):
            self.requests.append(start(part, self.message.peer, nbytes % self._comms.largest_tag))


class RendezvousSend(MessageRequest):
    """Send of a user's message: an envelope, and a separate body if the content is long."""

    def __init__(self, comms: MpiCommunicators, message: Send, number: int) -> None:
        self._comms = comms
        self.message: Send = message
        tensor = message.tensor
        self._number = number
        self._envelope = _HEADER.pack(tensor.numel(), number, name_of(tensor.dtype))
        self._inline = tensor.nbytes <= INLINE_BYTES
        if self._inline:
            self._envelope += bytes(view_of(tensor)) if tensor.nbytes else b""
        self.requests: list[Any] = []
        self.held: object = (tensor, self._envelope)

    def start(self) -> None:
        send = self._comms.users.Isend
        message = self.message
        byte = self._comms.mpi.BYTE
        self.requests.append(send([self._envelope, byte], message.peer, 2 * message.tag))
        if not self._inline:
            for part, _ in _cut(self._comms, message.tensor):
                self.requests.append(send(part, message.peer, 2 * self._number + 1))


class RendezvousRecv(MessageRequest):
    """Receive of a user's message: the envelope, and then the body if the content is long."""

    def __init__(self, comms: MpiCommunicators, message: Recv) -> None:
        self._comms = comms
        self.message: Recv = message
        self._envelope = bytearray(ENVELOPE_BYTES)
        self._opened = False
        self.requests: list[Any] = []
        self.held: object = (message.tensor, self._envelope)

    def start(self) -> None:
        receive = self._comms.users.Irecv
        message = self.message
        self.requests.append(receive([self._envelope, self._comms.mpi.BYTE], message.peer, 2 * message.tag))

    def arrived(self) -> None:
        if self._opened:
            return
        self._opened = True
        message = self.message
        tensor = self.message.tensor
        number = opened(self._comms, self._envelope, message)
        if tensor.nbytes <= INLINE_BYTES:
            content = bytes(memoryview(self._envelope)[_HEADER.size : _HEADER.size + tensor.nbytes])
            ctypes.memmove(tensor.data_ptr(), content, tensor.nbytes)
            return
        for part, _ in _cut(self._comms, tensor):
            self.requests.append(self._comms.users.Irecv(part, message.peer, 2 * number + 1))


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
