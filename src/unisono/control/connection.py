"""The server's side of one connection: the proof of the secret, frames in, frames out."""

from __future__ import annotations

import socket
import time
from select import select
from selectors import EVENT_READ

from unisono.control.channel import HELLO_BYTES, PROOF_BYTES, Channel, Greeting, claimed_rank

__all__ = ["Connection"]

_READ_BYTES = 1 << 16
_MAX_UNREAD_BYTES = 256 << 20


class Connection:
    """A peer whose socket does not block.

    Attributes:
        serves: The number of the client that it belongs to: that of the client's first connection.
        known: Whether it has shown that it knows the secret.
        claims: The rank that it says it is, though it has another secret.
        in_peace: Whether it has said that it will go.
        watched: What the selector is asked to tell of its socket.
        waiting: Whether bytes wait until it has read others.
        deadline: By when it must be known, on the monotonic clock.
    """

    def __init__(self, number: int, peer: socket.socket, secret: bytes, deadline: float) -> None:
        peer.setblocking(False)
        self.number, self.peer, self.deadline = number, peer, deadline
        self.serves = number
        self.in_peace = False
        self.claims: int | None = None
        self.watched = EVENT_READ
        self._greeting = Greeting(secret, client=False)
        self._met = False
        self._channel: Channel | None = None
        self._arrived = bytearray()
        self._unsent = bytearray()

    @property
    def known(self) -> bool:
        return self._channel is not None

    @property
    def waiting(self) -> bool:
        return bool(self._unsent)

    def read(self) -> list[bytes]:
        """The contents of the frames that have arrived. Raises ConnectionError at the end, and for a stranger."""
        try:
            data = self.peer.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionError("the connection has ended")
        if self._channel is not None:
            return self._channel.open(data)
        self._arrived += data
        return self._greet()

    def _greet(self) -> list[bytes]:
        if not self._met and len(self._arrived) >= HELLO_BYTES:
            if not self._greeting.meet(self._cut(HELLO_BYTES)):
                raise ConnectionError("not a rank")
            self._met = True
            self._queue(self._greeting.hello + self._greeting.proof())
        if not self._met or len(self._arrived) < PROOF_BYTES:
            return []
        proof = self._cut(PROOF_BYTES)
        if not self._greeting.accepts(proof):
            self.claims = claimed_rank(proof)
            raise ConnectionError("the secrets differ")
        self._channel = self._greeting.channel()
        return self._channel.open(bytes(self._arrived))

    def _cut(self, length: int) -> bytes:
        data = bytes(self._arrived[:length])
        del self._arrived[:length]
        return data

    def write(self, content: bytes) -> None:
        """Send a frame, now or when the peer has read. Raises OSError if it never does."""
        assert self._channel is not None, "only a peer that is known is written to"
        self._queue(self._channel.seal(content))

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
