"""Frames: the format of all data, except tensors, on connections between processes.

A frame consists of a header (length of the content, kind, number, hash) and the content. The hash covers the frame's
position in the stream, kind, number and content. With keys, the hash authenticates the sender. If the kernel
authenticates the peer, no keys are used, but the hash still detects bytes that other programs have written between
frames.
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
    "frame_bytes",
    "within",
]

MAX_FRAME_BYTES = 64 << 20
READ_BYTES = 1 << 16
"""Maximum number of bytes to read in one call."""

_HEAD = struct.Struct("<IBi16s")
_HASHED = struct.Struct("<QBi")
HEAD_BYTES = _HEAD.size


class Kind(IntEnum):
    """Kind of a frame. A reader specifies the kinds that it accepts; a frame of any other kind ends the stream."""

    OUT = 1
    """Standard output of rank `number`; -1 is the process that forks ranks."""
    ERR = 2
    """Standard error of rank `number`. `OUT` and `ERR` equal the file descriptors of their streams."""
    REQUEST = 3
    """A request to the control plane: a value of `unisono.serialization`."""
    REPLY = 4
    """The answer to a request: a value of `unisono.serialization`."""
    NEWS = 5
    """An unsolicited report of the control plane: JSON."""
    ADDRESS = 6
    """Address and secret of a control plane: a value of `unisono.serialization`."""
    HELLO = 7
    """A rank's host, or rank 0's address, sent over MPI: a value of `unisono.serialization`."""
    DEBUG = 8
    """A debugger's request: JSON."""
    ANSWER = 9
    """The answer to a debugger: JSON."""
    ORDER = 10
    """Description of the program to start: JSON."""
    SIGNAL = 11
    """A signal for all ranks: its number."""
    STARTED = 12
    """Start of rank `number`, with its process as JSON; or, without content, the start of all ranks."""
    ENDED = 13
    """End of rank `number`: JSON."""
    STATUSES = 14
    """The exit statuses of all ranks, as JSON; this is the last frame."""
    MAIL = 15
    """A message of a mailbox: see `unisono.core.mail`. The bodies of the message follow unframed."""
    CALL = 16
    """A call on a torch process group, to compare between ranks: see `unisono.control.watched_calls`."""


class Frame(NamedTuple):
    """A frame.

    Attributes:
        kind: Kind of the content.
        number: Number whose meaning depends on the kind, such as a rank or a signal; otherwise 0.
        content: The bytes.
    """

    kind: Kind
    number: int
    content: bytes

    def json(self) -> Any:
        """Return the content, parsed as JSON.

        Raises:
            ValueError: The content is not JSON.
        """
        try:
            return json.loads(self.content)
        except RecursionError:
            raise ValueError("JSON that nests too deep") from None


class InvalidFrameError(ValueError):
    """The peer did not encode these bytes, or encoded them for a different position in the stream."""


class FrameChannel:
    """Encodes a connection's outgoing frames, and verifies its incoming frames, in order.

    At most one thread may encode at a time, and at most one may decode.

    Args:
        send_key, receive_key: Keys for the hashes in each direction; empty if nobody else can write to the connection.
        most_bytes: Maximum size of a frame's content. A larger frame is rejected as soon as its header is read, before
            memory is allocated.
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
        """Return the frame to send next, whose content is a value encoded as JSON."""
        return self.encode(kind, json.dumps(value).encode(), number)

    def feed(self, data: bytes | bytearray) -> None:
        """Append bytes that have arrived."""
        self._arrived += data

    def next(self, *kinds: Kind) -> Frame | None:
        """Return the next frame, or None if it has not arrived completely.

        Args:
            kinds: Accepted kinds.

        Raises:
            InvalidFrameError: The frame is too long, of another kind, or not authentic. The stream is unusable after
                this error.
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
        # Look the kind up in the tuple, because `Kind(kind)` is slower.
        return Frame(kinds[kinds.index(kind)], number, content)

    def take(self, into: memoryview) -> int:
        """Move unframed bytes that follow the last frame into a buffer. Return their number."""
        step = min(len(into), len(self._arrived))
        into[:step] = self._arrived[:step]
        del self._arrived[:step]
        return step

    def available(self, peer: socket.socket, *kinds: Kind) -> list[Frame]:
        """Return the frames that have arrived on a non-blocking socket.

        Raises:
            ConnectionError: The connection has ended.
            InvalidFrameError: See `next`.
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
        """Wait for the next frame; return None if the stream has ended.

        Args:
            read: Function that waits for bytes, and returns empty bytes at the end of the stream: see `within`.
            kinds: Accepted kinds.

        Raises:
            ConnectionError: The stream ends within a frame.
            InvalidFrameError: See `next`.
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
        """Yield frames until the stream ends. Arguments and errors as for `receive`."""
        return iter(lambda: self.receive(read, *kinds), None)


def frame_bytes(head: bytes | memoryview) -> int:
    """Return the size in bytes of the frame that begins with `head`, which contains at least `HEAD_BYTES` bytes."""
    length: int = _HEAD.unpack_from(head)[0]
    return HEAD_BYTES + length


def _mac(key: bytes, place: int, kind: int, number: int, content: bytes) -> bytes:
    mac = blake2b(_HASHED.pack(place, kind, number), key=key, digest_size=16)
    mac.update(content)
    return mac.digest()


def within(peer: socket.socket, seconds: float) -> Callable[[], bytes]:
    """Return a function that reads from a blocking socket, and raises `TimeoutError` after a deadline.

    The deadline covers all reads, so that a peer cannot extend it by trickling bytes.
    """
    deadline = clock.now() + seconds

    def read() -> bytes:
        left_s = deadline - clock.now()
        if left_s <= 0:
            raise TimeoutError(f"nothing complete arrived within {seconds:g} s")
        peer.settimeout(left_s)
        return peer.recv(READ_BYTES)

    return read
