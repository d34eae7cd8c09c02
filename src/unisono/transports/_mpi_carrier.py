"""A user's message by MPI, of one tensor and again and again: what is in haste of it."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from unisono.compiled import compiled
from unisono.transports._seen import same, seen

__all__ = ["HEADER", "Carrier"]

HEADER = struct.Struct("<qq24s")
"""Before the first elements of a message: how many there are, its number, and the name of their dtype."""

_NUMBER = struct.Struct("<q")
_NUMBER_AT, _NAME_AT = 8, 16


@compiled
class Carrier:
    """What is kept of the messages of one tensor to or from one rank; src/compiled/carrier.c does the same.

    Args:
        lock: To be held while MPI is called, if anything.
        begin: MPI's function, `Isend` or `Irecv`.
        envelope: What travels first. Of who sends, it is as long as it is sent, and holds the header.
        first: The arguments of `begin` for the envelope.
        header: What the envelope has to begin with, but for the number.
        tensor, nbytes: The tensor, which is not held, and its length.
        rest: The tensor as MPI takes it, if it follows by itself; None if it is in the envelope.
        peer: The other rank.
        numbers: Of messages that follow by themselves.
        most: Their tags are 2 n + 1, where n is the number modulo this.
        receives: Whether it is received.
        looks: How often to ask MPI before giving way.

    Attributes:
        busy: Whether somebody has taken it, as who has made it: a message is under way, or was when an error ended
            its wait, since what it consists of may be in use for good then.
    """

    def __init__(
        self,
        lock: Any,
        begin: Callable[..., Any],
        envelope: bytearray,
        first: tuple[Any, ...],
        header: bytes,
        tensor: Any,
        nbytes: int,
        rest: Any,
        peer: int,
        numbers: Iterator[int],
        most: int,
        receives: bool,
        looks: int,
    ) -> None:
        self._turn: AbstractContextManager[Any] = lock or nullcontext()
        self._begin, self._envelope, self._first, self._header = begin, envelope, first, header
        self._seen, self._address, self._nbytes = seen(tensor), tensor.data_ptr(), nbytes
        self._rest, self._peer = rest, peer
        self._numbers, self._most, self._receives, self._looks = numbers, most, receives, looks
        # Of several threads, one takes the only element.
        self._free: list[None] = []

    @property
    def busy(self) -> bool:
        return not self._free

    def take(self) -> bool:
        """Whether it was free, and is this caller's now, who has to `carry` a message."""
        try:
            self._free.pop()
        except IndexError:
            return False
        return True

    def carry(self, tensor: Any, deadline: float, /) -> None:
        """One message, from its beginning to its end; it is free then."""
        if self._free:
            raise RuntimeError("nobody has taken it")
        under_way: list[Any] = []
        try:
            if self._receives:
                self._receive(under_way, tensor, deadline)
            else:
                self._send(under_way, tensor, deadline)
        except BaseException as error:
            # Whoever derives from this says which are MPI's; all others come back as they are.
            told = self._ended(error, under_way, tensor)
            if told is error:
                raise
            raise told from error
        self._free.append(None)

    def _look(self, tensor: Any) -> None:
        """Signals and other threads may have changed it in a wait. Its old memory may be another's by now."""
        if self._nbytes and not same(self._seen, tensor):
            raise RuntimeError("the tensor of a message was changed while the message was under way")

    def _send(self, under_way: list[Any], tensor: Any, deadline: float) -> None:
        self._look(tensor)
        if self._rest is None:
            self._envelope[HEADER.size :] = ctypes.string_at(self._address, self._nbytes)
            self._start(under_way, self._first)
        else:
            number = next(self._numbers) % self._most
            _NUMBER.pack_into(self._envelope, _NUMBER_AT, number)
            self._start(under_way, self._first)
            self._start(under_way, (self._rest, self._peer, 2 * number + 1))
        for request in under_way:
            self._finish(request, tensor, deadline)

    def _receive(self, under_way: list[Any], tensor: Any, deadline: float) -> None:
        self._start(under_way, self._first)
        self._finish(under_way[0], tensor, deadline)
        envelope, header = self._envelope, self._header
        if envelope[:_NUMBER_AT] != header[:_NUMBER_AT] or envelope[_NAME_AT : HEADER.size] != header[_NAME_AT:]:
            self._unfit(tensor)
        self._look(tensor)
        if self._rest is None:
            ctypes.memmove(self._address, bytes(envelope[HEADER.size : HEADER.size + self._nbytes]), self._nbytes)
        else:
            (number,) = _NUMBER.unpack_from(envelope, _NUMBER_AT)
            self._start(under_way, (self._rest, self._peer, 2 * number + 1))
            self._finish(under_way[1], tensor, deadline)

    def _start(self, under_way: list[Any], arguments: tuple[Any, ...]) -> None:
        with self._turn:
            under_way.append(self._begin(*arguments))

    def _finish(self, request: Any, tensor: Any, deadline: float) -> None:
        for _ in range(self._looks):
            with self._turn:
                if request.Test():
                    return
        self._see_through(request, tensor, deadline)

    # -- what `Letter` adds: the C class has no such methods, so they cannot be abstract ------------------
    def _see_through(self, request: Any, tensor: Any, deadline: float) -> None:
        """The rest of a wait that takes longer."""
        raise NotImplementedError

    def _unfit(self, tensor: Any) -> None:
        """Raise the error of a message that has come and is not what was expected."""
        raise NotImplementedError

    def _ended(self, error: BaseException, under_way: list[Any], tensor: Any) -> BaseException:
        """What to raise in the place of an error; what is under way may still touch the tensor's memory."""
        raise NotImplementedError
