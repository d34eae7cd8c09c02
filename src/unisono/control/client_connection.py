"""The client's side of one connection: reaching the server, frames out and in."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from unisono import serialization
from unisono.control import handshake
from unisono.control.inspect_socket import InspectSocket
from unisono.control.sockets import Channel, check_platform
from unisono.errors import CommError, CommTimeoutError

__all__ = ["ClientConnection", "connect", "reach"]

T = TypeVar("T")

_READ_BYTES = 1 << 16
_PAUSES_S = (0.01, 0.02, 0.05, 0.1, 0.2)
_HELLO_WITHIN_S = 5.0
_MAX_POLL_S = 1e6


class ClientConnection:
    """A connection on which both sides know each other. One thread at a time may send, and one receive."""

    def __init__(self, peer: socket.socket, channel: Channel) -> None:
        peer.setblocking(False)
        self._peer, self._channel = peer, channel
        self._sending = threading.Lock()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(peer, select.POLLIN)
        self._writable.register(peer, select.POLLOUT)
        self._inspect_socket: InspectSocket | None = None
        self._inspect_number = -1

    @property
    def local_host(self) -> str:
        """The address of this host on the route to the server."""
        host: str = self._peer.getsockname()[0]
        return host

    def send(self, content: bytes, deadline: float) -> None:
        """Send a frame. Raises OSError if the server does not take it by `deadline` (of the monotonic clock)."""
        with self._sending:
            rest = memoryview(self._channel.encode(content))
            while rest:
                try:
                    rest = rest[self._peer.send(rest) :]
                except BlockingIOError:
                    if not self._writable.poll(_milliseconds(deadline - time.monotonic())):
                        raise TimeoutError("the server does not read") from None

    def serve(self, inspect_socket: InspectSocket) -> None:
        """Answer at an inspect socket, too, while a thread waits for this connection."""
        if inspect_socket.socket is not None:
            self._inspect_socket, self._inspect_number = inspect_socket, inspect_socket.socket.fileno()
            self._readable.register(inspect_socket.socket, select.POLLIN)

    def receive(self, timeout: float | None) -> list[bytes]:
        """Return the contents of the frames that have arrived, none at the timeout. Raises OSError at the end."""
        found = dict(self._readable.poll(None if timeout is None else _milliseconds(timeout)))
        if self._inspect_socket is not None and self._inspect_number in found:
            self._inspect_socket.answer()
        if not found:
            return []
        try:
            data = self._peer.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionError("the connection has ended")
        return self._channel.decode(data)

    def hang_up(self) -> None:
        """End the connection; threads that read it are notified."""
        try:
            self._peer.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        self._peer.close()


def _milliseconds(seconds: float) -> int:
    return round(min(max(seconds, 0.0), _MAX_POLL_S) * 1000 + 0.5)


def connect(
    address: tuple[str, int], secret: bytes, timeout: float, rank: int | None = None
) -> tuple[ClientConnection, ClientConnection]:
    """Open two connections to the server, for requests and for news. It may start later than this client.

    If the secrets differ, the server is notified of the `rank`, if it is passed.

    Raises:
        CommTimeoutError: No server answers there.
        CommError: Something else answers there, or the secrets differ.
        UnavailableError: On Windows.
    """
    check_platform()
    return reach(address, timeout, lambda left_s: _both(address, secret, left_s, rank))


def reach(address: tuple[str, int], timeout: float, attempt: Callable[[float], T]) -> T:
    """Return the result of `attempt`, which gets the seconds that it may take, and is repeated while it fails.

    Raises:
        CommTimeoutError: No server answers there.
        CommError: There is no such host.
    """
    deadline = time.monotonic() + timeout
    failures = 0
    while True:
        try:
            return attempt(max(0.05, min(_HELLO_WITHIN_S, deadline - time.monotonic())))
        except UnicodeError as error:
            raise CommError(f"{address[0]!r} is not the name of a host") from error
        except OSError as error:
            pause = _PAUSES_S[min(failures, len(_PAUSES_S) - 1)]
            failures += 1
            if time.monotonic() + pause >= deadline:
                raise CommTimeoutError(
                    f"no answer from {address[0]}:{address[1]} after {timeout:.1f} s ({error.strerror or error}). "
                    "Is rank 0 running there, is the address right on every rank, and is the port open?",
                    waited_s=timeout,
                ) from error
            time.sleep(pause)


def _both(
    address: tuple[str, int], secret: bytes, timeout: float, rank: int | None
) -> tuple[ClientConnection, ClientConnection]:
    requests = _reach(address, secret, timeout, rank)
    news: ClientConnection | None = None
    try:
        news = _reach(address, secret, timeout, rank)
        # The server assigns the client's number; the second connection passes it, to be known as the same client's.
        number = _request(requests, requests, ("number",), timeout)
        _request(news, requests, ("news", number), timeout)
    except BaseException:
        requests.close()
        if news is not None:
            news.close()
        raise
    return requests, news


def _request(out: ClientConnection, back: ClientConnection, words: tuple[object, ...], timeout: float) -> object:
    out.send(serialization.encode((1, words)), time.monotonic() + timeout)
    contents = back.receive(timeout)
    if not contents:
        raise TimeoutError("the server does not answer")
    return serialization.decode(contents[0])[2]


def _reach(address: tuple[str, int], secret: bytes, timeout: float, rank: int | None) -> ClientConnection:
    try:
        return ClientConnection(*handshake.connect(address, secret, timeout, rank))
    except handshake.AuthenticationError as error:
        if not error.other_secret:
            raise CommError(
                f"the program at {address[0]}:{address[1]} is not a control plane of unisono; choose another port"
            ) from error
        raise CommError(
            f"authentication failed: this rank and the control plane at {address[0]}:{address[1]} use different "
            "secrets. Set UNISONO_SECRET to the same value on every host, or pass the same secret to every rank"
        ) from error
