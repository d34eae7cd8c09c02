"""Authenticated TCP connections: both sides prove that they know the secret, within a few seconds."""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import time
from collections.abc import Callable

from unisono.control.encryption import ADVICE, TLS_RECORDS, EncryptedSocket, UntrustedError, encrypted, tls_context
from unisono.control.sockets import HELLO_BYTES, PROOF_BYTES, RANK_BYTES, Hello, tune
from unisono.core import clock
from unisono.core.frames import FrameChannel
from unisono.host.network import host_in

__all__ = ["Acceptor", "AuthenticationError", "Handshake", "connect", "dial"]

_log = logging.getLogger(__name__)

_WITHIN_S = 5.0
_LEAST_S = 0.01
_MAX_PENDING = 512
_ACCEPT_BACKOFF_S = 0.01
_MOST_UNREAD = 1 << 16


class AuthenticationError(Exception):
    """The peer uses a different protocol or a different secret.

    Attributes:
        other_secret: Whether the secret differs.
        versions: Text about a peer with a different version of this package; empty otherwise.
    """

    def __init__(self, *, other_secret: bool, versions: str = "") -> None:
        super().__init__("the secrets differ" if other_secret else versions or "the peer is not unisono")
        self.other_secret = other_secret
        self.versions = versions


class Handshake:
    """One side of the authentication of a connection; see `unisono.control.sockets` for the wire format.

    Bytes that follow the handshake are not read.

    Args:
        peer: The connection. `advance` waits for bytes only if the socket is blocking.
        secret: The secret that both sides should know.
        client: Whether this side is the client, which opened the connection.
        rank: Rank of the client, sent to the server.

    Attributes:
        peer: The connection.
        deadline: Time on the library's clock at which an `Acceptor` drops the connection.
    """

    def __init__(self, peer: socket.socket, secret: bytes, *, client: bool = False, rank: int | None = None) -> None:
        self.peer = peer
        self.deadline: float = clock.now() + _WITHIN_S
        self._hello = Hello(secret, client=client, rank=rank)
        self._client = client
        self._met = False
        self._arrived = b""
        self._expected = HELLO_BYTES

    @property
    def rank(self) -> int | None:
        """The client's rank: unverified until `advance` has returned a channel."""
        return self._hello.rank

    def start(self) -> None:
        """Send the client's hello."""
        self.peer.sendall(self._hello.hello)

    def advance(self) -> FrameChannel | None:
        """Read what has arrived, and answer. Return the channel once both sides have proved that they know the secret.

        Raises:
            OSError: The connection has ended.
            AuthenticationError: The peer uses another protocol or another secret.
        """
        try:
            data = self.peer.recv(self._expected - len(self._arrived))
        except BlockingIOError:
            return None
        if not data:
            self._refuse_encrypted(self._arrived)
            raise ConnectionError("the connection was closed immediately")
        self._arrived += data
        if len(self._arrived) < self._expected:
            return None
        data = self._arrived
        self._arrived = b""
        if not self._met:
            self._meet(data)
            return None
        return self._conclude(data)

    def _meet(self, hello: bytes) -> None:
        if not self._hello.meet(hello):
            self._refuse_encrypted(hello)
            versions = self._hello.versions(hello)
            if versions and not self._client:
                # Send this side's version, so that the client can also report the version mismatch.
                with contextlib.suppress(OSError):
                    self.peer.sendall(self._hello.hello)
            raise AuthenticationError(other_secret=False, versions=versions)
        self._met = True
        self._expected = PROOF_BYTES
        if not self._client:
            self.peer.sendall(self._hello.hello + self._hello.proof())
            self._expected += RANK_BYTES

    def _refuse_encrypted(self, data: bytes) -> None:
        """Raise `UntrustedError` if `data` starts with a TLS record, but this side does not use TLS."""
        if self._met or data[:1] not in TLS_RECORDS or isinstance(self.peer, EncryptedSocket):
            return
        if not self._client:
            # Answering without TLS tells the client why it was refused. First read everything, because unread bytes
            # would reset the connection.
            with contextlib.suppress(OSError):
                self.peer.recv(_MOST_UNREAD)
                self.peer.sendall(self._hello.hello)
        raise UntrustedError("the other side encrypts, and this one does not")

    def _conclude(self, proof: bytes) -> FrameChannel:
        if not self._hello.accepts(proof):
            if self._client:
                with contextlib.suppress(OSError):
                    self.peer.sendall(self._hello.claim())
            raise AuthenticationError(other_secret=True)
        if self._client:
            self.peer.sendall(self._hello.proof())
        return self._hello.channel()


def connect(
    address: tuple[str, int], secret: bytes, timeout: float, rank: int | None = None
) -> tuple[socket.socket, FrameChannel]:
    """Connect, and authenticate both sides, within `timeout` seconds.

    Raises:
        OSError: The server cannot be reached, or does not respond.
        AuthenticationError: Another program answers, or the secrets differ.
    """
    deadline = clock.now() + timeout
    context = tls_context(server=False)
    peer = dial(address, timeout)
    try:
        tune(peer)
        peer = encrypted(peer, context, max(_LEAST_S, deadline - clock.now()))
        handshake = Handshake(peer, secret, client=True, rank=rank)
        handshake.start()
        channel = None
        while channel is None:
            peer.settimeout(max(_LEAST_S, deadline - clock.now()))
            channel = handshake.advance()
    except BaseException as error:
        peer.close()
        if isinstance(peer, EncryptedSocket) and isinstance(error, ConnectionError):
            # The server's verdict on this side's certificate arrives after this side has trusted the server.
            if isinstance(peer.failure, UntrustedError):
                raise peer.failure from error
            raise ConnectionError(f"TLS: {error}. {ADVICE}") from error
        raise
    return peer, channel


def dial(address: tuple[str, int], timeout: float) -> socket.socket:
    """Return a connection to the first of a host's addresses that responds, within `timeout` seconds.

    Raises:
        OSError: The server cannot be reached.
    """
    found = len(socket.getaddrinfo(*address, type=socket.SOCK_STREAM))
    # Limit the time for each address, so that an unreachable address leaves time for the other addresses, and for the
    # handshake.
    peer = socket.create_connection(address, timeout if found == 1 else timeout / (found + 1))
    try:
        if peer.getsockname() == peer.getpeername():
            # The socket is connected to itself: nobody listens on the server's port, and the kernel assigned that port
            # to this socket.
            raise ConnectionRefusedError("nobody listens there")
    except OSError:
        # A server that is shutting down may already have reset the connection, which then has no peer name.
        peer.close()
        raise
    return peer


class Acceptor:
    """Authenticates incoming connections concurrently; a silent client is dropped after 5 s, and doesn't block others.

    Args:
        listener: The listening socket; the caller keeps ownership.
        secret: The secret that clients should know.
        selector: The caller's selector. The caller calls `accept` when the listener is readable. A pending connection's
            data in the selector is a `Handshake`, which the caller passes to `advance` when the connection is readable.
        on_refused: Called for each client that is refused because its secret or TLS settings differ, with the rank (or
            None) that it claims, its host, and the reason.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        selector: selectors.BaseSelector,
        on_refused: Callable[[int | None, str, str], None] = lambda rank, host, why: None,
    ) -> None:
        self._listener = listener
        self._secret = secret
        self._selector = selector
        self._on_refused = on_refused
        self._context = tls_context(server=True)
        self._pending: dict[socket.socket, Handshake] = {}
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)

    def wait_s(self) -> float | None:
        """Seconds until `tidy` has something to do; None if no client is pending."""
        deadlines = [handshake.deadline for handshake in self._pending.values()]
        return max(0.0, min(deadlines) - clock.now()) if deadlines else None

    def accept(self) -> None:
        """Accept a client that has connected."""
        try:
            peer, _ = self._listener.accept()
            tune(peer)
            peer = encrypted(peer, self._context)
        except OSError as error:
            # No file descriptors are left: expire pending clients to free some; otherwise, `select` would report this
            # connection forever.
            if error.errno in (errno.EMFILE, errno.ENFILE):
                for handshake in self._pending.values():
                    handshake.deadline = 0.0
                time.sleep(_ACCEPT_BACKOFF_S)
            return
        peer.setblocking(False)
        self._pending[peer] = Handshake(peer, self._secret)
        self._selector.register(peer, selectors.EVENT_READ, self._pending[peer])

    def advance(self, handshake: Handshake) -> FrameChannel | None:
        """Serve a client.

        The connection of a returned channel belongs to the caller, and is no longer in the selector.
        """
        try:
            channel = handshake.advance()
        except (OSError, AuthenticationError) as error:
            _log.debug("client refused: %s", error)
            failure = getattr(handshake.peer, "failure", None) or error
            if handshake.rank is not None or isinstance(failure, UntrustedError):
                with contextlib.suppress(OSError):
                    self._on_refused(handshake.rank, host_in(handshake.peer.getpeername()), str(failure))
            self._forget(handshake).close()
            return None
        if channel is not None:
            self._forget(handshake)
        return channel

    def tidy(self) -> None:
        """Drop clients that took too long and, if there are too many, the oldest ones. Call after each `select`."""
        now = clock.now()
        too_many = len(self._pending) - _MAX_PENDING
        for index, handshake in enumerate(list(self._pending.values())):
            if handshake.deadline <= now or index < too_many:
                self._forget(handshake).close()

    def close(self) -> None:
        """Close unauthenticated connections. Leaves the selector unchanged, because a forked child may call `close`."""
        for peer in self._pending:
            peer.close()

    def _forget(self, handshake: Handshake) -> socket.socket:
        del self._pending[handshake.peer]
        self._selector.unregister(handshake.peer)
        return handshake.peer
