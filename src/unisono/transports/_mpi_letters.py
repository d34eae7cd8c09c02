"""A user's blocking message by the shorter way of MPI; the other end may use `Sent` and `Received`."""

from __future__ import annotations

import time
from typing import Any

import torch

from unisono.errors import PeerLostError
from unisono.mpilib import until
from unisono.tensors import is_plain
from unisono.transports._mpi_carrier import HEADER, Carrier
from unisono.transports._mpi_messages import Messages, keep
from unisono.transports._mpi_parts import ENVELOPE_BYTES, INLINE_BYTES, LONGEST, memory, name_of, opened
from unisono.types import MAX_TAG, Recv, Send
from unisono.work import late

__all__ = ["Letter", "letter_for"]

_LOOKS_A_SPIN = 3
_LAST_LOOKS = 100


def letter_for(messages: Messages, name: str, tensor: Any, peer: int, tag: int) -> Letter | None:
    """A letter that its caller has taken; None if what is given is wrong, which the longer way tells, or takes more."""
    comms = messages.comms
    if type(peer) is not int or type(tag) is not int or not 0 <= tag <= min(MAX_TAG, comms.largest_tag):
        return None
    if not 0 <= peer < comms.users.Get_size() or peer == comms.users.Get_rank():
        return None
    if not is_plain(tensor) or tensor.nbytes > LONGEST:
        return None
    return Letter(messages, (Send if name == "send" else Recv)(tensor, peer, tag))


class Letter(Carrier):
    """The messages of a tensor that `is_plain`, to or from one rank, by one tag.

    Args:
        messages: Of the communicator.
        message: The first of them; its tensor is not held.
    """

    def __init__(self, messages: Messages, message: Send | Recv) -> None:
        comms, tensor, receives = messages.comms, message.tensor, isinstance(message, Recv)
        inline = tensor.nbytes <= INLINE_BYTES
        header = HEADER.pack(tensor.numel(), 0, name_of(tensor.dtype))
        sent = bytearray(header) + bytes(tensor.nbytes if inline else 0)
        envelope = bytearray(ENVELOPE_BYTES) if receives else sent
        super().__init__(
            comms.lock,
            comms.users.Irecv if receives else comms.users.Isend,
            envelope,
            ([envelope, comms.mpi.BYTE], message.peer, 2 * message.tag),
            header,
            tensor,
            tensor.nbytes,
            None if inline else [memory(comms, tensor), comms.mpi.BYTE],
            message.peer,
            messages.numbers,
            comms.largest_tag,
            receives,
            _LOOKS_A_SPIN * messages.spins,
        )
        self._messages, self._opened, self._kind, self._tag = messages, envelope, type(message), message.tag
        self._to = message.peer

    def _see_through(self, request: Any, tensor: torch.Tensor, deadline: float) -> None:
        messages, began = self._messages, time.monotonic()

        def done() -> bool:
            with messages.comms.turn:
                return bool(request.Test())

        try:
            spins = messages.spins_for(tensor.nbytes)
            over = until(done, deadline, lambda: messages.look([self._to]), spins)
        except PeerLostError:
            # What a rank sent before it left may be here.
            if not self._has_come_after_all(request):
                raise
            return
        if not over:
            raise late([self._kind(tensor, self._to, self._tag)], time.monotonic() - began)

    def _has_come_after_all(self, request: Any) -> bool:
        comms = self._messages.comms
        try:
            with comms.turn:
                return any(request.Test() for _ in range(_LAST_LOOKS))
        except comms.mpi.Exception:
            # MPI has heard of it too, meanwhile.
            return False

    def _unfit(self, tensor: torch.Tensor) -> None:
        opened(self._messages.comms, self._opened, Recv(tensor, self._to, self._tag))

    def _ended(self, error: BaseException, under_way: list[Any], tensor: torch.Tensor) -> BaseException:
        comms = self._messages.comms
        keep([(request, (tensor, self)) for request in under_way], comms.turn)
        if not isinstance(error, comms.mpi.Exception):
            return error
        told = comms.error_of(error)
        told.__cause__ = error
        return told
