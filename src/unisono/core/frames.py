"""Frames: how everything but tensors travels on connections between processes, whoever speaks.

A frame is a head (length of the content, kind, number, hash) and the content. The hash covers the frame's place in the
stream, its kind, number and content. With keys it proves who sent them; without, where the kernel knows the peer, it
still finds what other programs have written between the frames.
"""

from __future__ import annotations

import hmac
import json
import socket
import struct
from collections.abc import Callable, Iterator
from enum import IntEnum
from hashlib import blake2b
from typing import Any, NamedTuple

from unisono.core import clock

__all__ = [
    "HEAD_BYTES",
    "MAX_FRAME_BYTES",
    "READ_BYTES",
    "Frame",
    "FrameChannel",
    "InvalidFrameError",
    "Kind",
    "within",
]

MAX_FRAME_BYTES = 64 << 20
READ_BYTES = 1 << 16
"""Most bytes to read in one call."""

_HEAD = struct.Struct("<IBi16s")
_HASHED = struct.Struct("<QBi")
HEAD_BYTES = _HEAD.size


class Kind(IntEnum):
    """What a frame carries. Whoever reads names the kinds that may come, and any other ends the stream."""

    OUT = 1
    """What rank `number` has written to standard output; -1 is the process that forks ranks."""
    ERR = 2
    """The same of standard error. Both have the numbers of the streams."""
    REQUEST = 3
    """A request to the control plane: a value of `unisono.serialization`."""
    REPLY = 4
    """The answer to a request: a value of `unisono.serialization`."""
    NEWS = 5
    """What the control plane reports unasked: JSON."""
    ADDRESS = 6
    """Address and secret of a control plane: a value of `unisono.serialization`."""
    HELLO = 7
    """A rank's host, or rank 0's address, over MPI: a value of `unisono.serialization`."""
    DEBUG = 8
    """A debugger's request: JSON."""
    ANSWER = 9
    """The answer to a debugger: JSON."""
    ORDER = 10
    """What to start: JSON."""
    SIGNAL = 11
    """A signal for all ranks: its number."""
    STARTED = 12
    """That rank `number` has started, and its process, as JSON; or, without, that all ranks have."""
    ENDED = 13
    """How rank `number` has ended: JSON."""
    STATUSES = 14
    """The exit statuses of all ranks, the last frame: JSON."""
    MAIL = 15
    """A message of a mailbox: see `unisono.core.mail`. Its bodies follow as they are, in no frame."""
    CALL = 16
    """A call on a process group of torch's, to be compared: see `unisono.control.watched_calls`."""


class Frame(NamedTuple):
    """One frame.

    Attributes:
        kind: What it carries.
        number: Of the kind's choice: a rank, a signal; else 0.
        content: The bytes.
    """

    kind: Kind
    number: int
    content: bytes

    def json(self) -> Any:
        """Return the content, which is JSON.

        Raises:
            ValueError: It is not.
        """
        try:
            return json.loads(self.content)
        except RecursionError:
            raise ValueError("JSON that nests too deep") from None


class InvalidFrameError(ValueError):
    """Bytes that the peer did not encode, or not at this position in the stream."""


class FrameChannel:
    """Encoder of outgoing and verifier of incoming frames of one connection, in order.

    One thread at a time may encode, and one decode.

    Args:
        send_key, receive_key: Keys of the hashes in each direction; empty if nobody else can write there.
        most_bytes: Most bytes of a frame's content. A longer frame is refused at its head, before memory is taken.
    """

    def __init__(self, send_key: bytes = b"", receive_key: bytes = b"", most_bytes: int = MAX_FRAME_BYTES) -> None:
        self._send_key = send_key
        self._receive_key = receive_key
        self._most_bytes = most_bytes
        self._encoded = 0
        self._decoded = 0
        self._arrived = bytearray()

    def encode(self, kind: Kind, content: bytes = b"", number: int = 0) -> bytes:
        """Return the frame to send next."""
        if len(content) > self._most_bytes:
            raise ValueError(
                f"{len(content)} bytes are too many for one message; at most {self._most_bytes} are allowed"
            )
        mac = _mac(self._send_key, self._encoded, kind, number, content)
        self._encoded += 1
        return _HEAD.pack(len(content), kind, number, mac) + content

    def encode_json(self, kind: Kind, value: object, number: int = 0) -> bytes:
        """Return the frame to send next, whose content is a value as JSON."""
        return self.encode(kind, json.dumps(value).encode(), number)

    def feed(self, data: bytes | bytearray) -> None:
        """Take bytes that have arrived."""
        self._arrived += data

    def next(self, *kinds: Kind) -> Frame | None:
        """Return the next frame; None if it has not arrived whole.

        Args:
            kinds: Those that may come.

        Raises:
            InvalidFrameError: The frame is too long, of another kind, or not authentic. No frame can follow.
        """
        if len(self._arrived) < _HEAD.size:
            return None
        length, kind, number, mac = _HEAD.unpack_from(self._arrived)
        if length > self._most_bytes:
            raise InvalidFrameError("a frame is too long")
        if kind not in kinds:
            raise InvalidFrameError(f"a frame of kind {kind} does not belong here")
        end = _HEAD.size + length
        if len(self._arrived) < end:
            return None
        content = bytes(memoryview(self._arrived)[_HEAD.size : end])
        if not hmac.compare_digest(mac, _mac(self._receive_key, self._decoded, kind, number, content)):
            raise InvalidFrameError("a frame is not authentic")
        self._decoded += 1
        del self._arrived[:end]
        # Cheaper than to look the member up.
        return Frame(kinds[kinds.index(kind)], number, content)

    def take(self, into: memoryview) -> int:
        """Move bytes that follow the last frame, and are in none. Return their number."""
        step = min(len(into), len(self._arrived))
        into[:step] = self._arrived[:step]
        del self._arrived[:step]
        return step

    def available(self, peer: socket.socket, *kinds: Kind) -> list[Frame]:
        """Return the frames that have arrived at a socket that does not block.

        Raises:
            ConnectionError: The connection has ended.
            InvalidFrameError: As `next` does.
        """
        try:
            data = peer.recv(READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionError("the connection has ended")
        self.feed(data)
        return [*iter(lambda: self.next(*kinds), None)]

    def receive(self, read: Callable[[], bytes], *kinds: Kind) -> Frame | None:
        """Wait for the next frame; return None at the end of the stream.

        Args:
            read: Waits for bytes, and returns none at the end: see `within`.
            kinds: Those that may come.

        Raises:
            ConnectionError: The stream ends within a frame.
            InvalidFrameError: As `next` does.
        """
        while (frame := self.next(*kinds)) is None:
            data = read()
            if not data and self._arrived:
                raise ConnectionError("the connection has ended within a frame")
            if not data:
                return None
            self.feed(data)
        return frame

    def frames(self, read: Callable[[], bytes], *kinds: Kind) -> Iterator[Frame]:
        """Yield frames until the stream ends. Arguments and errors are those of `receive`."""
        return iter(lambda: self.receive(read, *kinds), None)


def _mac(key: bytes, place: int, kind: int, number: int, content: bytes) -> bytes:
    mac = blake2b(_HASHED.pack(place, kind, number), key=key, digest_size=16)
    mac.update(content)
    return mac.digest()


def within(peer: socket.socket, seconds: float) -> Callable[[], bytes]:
    """Return a function that reads from a blocking socket, and raises `TimeoutError` when the time is up.

    The time is for all that is read, so that a peer cannot extend it by sending a little now and then.
    """
    deadline = clock.now() + seconds

    def read() -> bytes:
        left_s = deadline - clock.now()
        if left_s <= 0:
            raise TimeoutError(f"nothing complete arrived within {seconds:g} s")
        peer.settimeout(left_s)
        return peer.recv(READ_BYTES)

    return read
