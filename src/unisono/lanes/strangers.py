"""Who connects says who he is, and has little time for it; who says nothing holds up nobody."""

from __future__ import annotations

import hmac
import selectors
import socket
import time
from types import TracebackType
from typing import Self

from unisono.control.sockets import tune

__all__ = ["TOKEN_BYTES", "Strangers", "introduction"]

TOKEN_BYTES = 32
_NUMBER_BYTES = 4
_WITHIN_S = 5.0
_MOST = 256


def introduction(token: bytes, host: int) -> bytes:
    """What a host says first: the word that the other one has told it, and its own number."""
    return token + host.to_bytes(_NUMBER_BYTES, "little")


class Strangers:
    """Lets in whoever connects, hears them all at once, and tells who has shown the word.

    Each has 5 s. If there are too many, who has been silent for longest has to go.

    Args:
        listener: Where they connect; it is the caller's.
        token: The word.
    """

    def __init__(self, listener: socket.socket, token: bytes) -> None:
        self._listener, self._token = listener, token
        self._waiting: dict[socket.socket, _Stranger] = {}
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def introduced(self, within_s: float) -> list[tuple[int, socket.socket, str]]:
        """The numbers of those who have shown the word, their connections and addresses, as soon as there are any."""
        end = time.monotonic() + within_s
        found: list[tuple[int, socket.socket, str]] = []
        while not found and (left_s := end - time.monotonic()) > 0:
            for key, _ in self._selector.select(left_s):
                if key.fileobj is self._listener:
                    self._admit()
                else:
                    found += self._heard(key.data)
            self._turn_away()
        return found

    def _admit(self) -> None:
        try:
            peer, where = self._listener.accept()
        except OSError:
            # It has gone again.
            return
        stranger = self._waiting[peer] = _Stranger(peer, f"{where[0]}:{where[1]}")
        peer.setblocking(False)
        self._selector.register(peer, selectors.EVENT_READ, stranger)

    def _heard(self, stranger: _Stranger) -> list[tuple[int, socket.socket, str]]:
        """The one of them who has said something, if that was all and right."""
        try:
            whole = stranger.listen()
        except OSError:
            self._forget(stranger).close()
            return []
        if not whole:
            return []
        peer = self._forget(stranger)
        token, number = stranger.said[:TOKEN_BYTES], stranger.said[TOKEN_BYTES:]
        if not hmac.compare_digest(token, self._token):
            peer.close()
            return []
        return [(int.from_bytes(number, "little"), peer, stranger.where)]

    def _turn_away(self) -> None:
        """Who is late; and, if they are too many, who came first."""
        now, too_many = time.monotonic(), len(self._waiting) - _MOST
        for place, stranger in enumerate(list(self._waiting.values())):
            if stranger.deadline <= now or place < too_many:
                self._forget(stranger).close()

    def _forget(self, stranger: _Stranger) -> socket.socket:
        del self._waiting[stranger.peer]
        self._selector.unregister(stranger.peer)
        return stranger.peer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stranger in list(self._waiting.values()):
            self._forget(stranger).close()
        self._selector.close()


class _Stranger:
    """One connection, and what has come over it."""

    def __init__(self, peer: socket.socket, where: str) -> None:
        self.peer, self.where = peer, where
        self.deadline = time.monotonic() + _WITHIN_S
        self.said = b""

    def listen(self) -> bool:
        """Whether the introduction is complete. What comes after it is for others to read."""
        more = self.peer.recv(TOKEN_BYTES + _NUMBER_BYTES - len(self.said))
        if not more:
            raise ConnectionError("it has hung up")
        self.said += more
        if len(self.said) < TOKEN_BYTES + _NUMBER_BYTES:
            return False
        tune(self.peer)
        return True
