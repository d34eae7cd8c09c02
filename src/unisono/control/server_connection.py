"""The server's side of one connection: frames in, frames out."""

from __future__ import annotations

import socket
import time
from select import select
from selectors import EVENT_READ

from unisono.control.auth_channel import Channel

__all__ = ["Connection"]

_READ_BYTES = 1 << 16
_MAX_UNREAD_BYTES = 256 << 20


class Connection:
    """A connection of a client that has proved the secret, with a non-blocking socket.

    Attributes:
        serves: The number of the client that it belongs to: that of the client's first connection.
        clean_exit: Whether the client has announced that it will leave.
        watched: The events of its socket that the selector reports.
        waiting: Whether bytes wait until the client has read others.
    """

    def __init__(self, number: int, peer: socket.socket, channel: Channel) -> None:
        self.number, self.peer, self._channel = number, peer, channel
        self.serves = number
        self.clean_exit = False
        self.watched = EVENT_READ
        self._unsent = bytearray()

    @property
    def waiting(self) -> bool:
        return bool(self._unsent)

    def read(self) -> list[bytes]:
        """Return the contents of the frames that have arrived. Raises ConnectionError at the end."""
        try:
            data = self.peer.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionError("the connection has ended")
        return self._channel.decode(data)

    def write(self, content: bytes) -> None:
        """Send a frame, now or when the peer has read. Raises OSError if it never does."""
        self._queue(self._channel.encode(content))

    def _queue(self, data: bytes) -> None:
        if self._unsent:
            self._unsent += data
            if len(self._unsent) > _MAX_UNREAD_BYTES:
                raise ConnectionError("the peer does not read what is sent to it")
            return
        sent = self._send(data)
        self._unsent += memoryview(data)[sent:]

    def flush(self) -> None:
        """Send what can be sent now."""
        while self._unsent:
            sent = self._send(self._unsent)
            if not sent:
                return
            del self._unsent[:sent]

    def flush_until(self, deadline: float) -> None:
        """Send the rest, for as long as there is time."""
        self.flush()
        while self._unsent and (left_s := deadline - time.monotonic()) > 0:
            select([], [self.peer], [], left_s)
            self.flush()

    def _send(self, data: bytes | bytearray) -> int:
        try:
            return self.peer.send(data)
        except BlockingIOError:
            return 0
