"""TLS for connections between ranks: a thread relays all connections, so that all other code uses plain sockets."""

from __future__ import annotations

import atexit
import logging
import os
import select
import selectors
import socket
import ssl
import stat
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NoReturn

from unisono.control.sockets import outage
from unisono.core import clock
from unisono.core.forks import invalidate_after_fork
from unisono.errors import CommError

__all__ = [
    "ADVICE",
    "TLS",
    "TLS_RECORDS",
    "EncryptedSocket",
    "UntrustedError",
    "encrypted",
    "refuse_unencrypted",
    "tls_context",
]

_log = logging.getLogger("unisono")

TLS = "UNISONO_TLS"
"""Variable with a PEM file: this rank's key and certificate, and the certificates that it trusts."""
ADVICE = f"Do all ranks have {TLS}, with certificates that the others trust?"
TLS_RECORDS = b"\x15", b"\x16"
"""Possible first bytes from a peer that speaks TLS: the first byte of an alert, and of a handshake message."""
_ALERT = b"\x15\x03\x03\x00\x02\x02\x46"
"""A fatal alert, "protocol version"."""

_BYTES = 256 << 10
"""Maximum number of bytes queued in one direction of a connection; the last read may exceed it."""
_TRUST_WITHIN_S = 10.0
"""Seconds for a peer to prove its certificate; longer than for the secret, whose proof is sent inside TLS."""
_TIDY_EVERY_S = 1.0
_FLUSH_S = 2.0
"""Seconds to send the last bytes when the process exits."""


class UntrustedError(ConnectionError):
    """The peer does not encrypt, or one side does not trust the other's certificate. Retrying is useless.

    Attributes:
        reason: The reason, as part of the error text; OpenSSL's own text if OpenSSL reported it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"TLS: {reason}. {ADVICE}")
        self.reason = reason


def tls_context(*, server: bool) -> ssl.SSLContext | None:
    """Return the TLS settings for a server or a client; each presents its certificate and requests its peer's.

    Returns: The settings; None unless connections between ranks are encrypted.

    Raises:
        CommError: The file in `UNISONO_TLS` cannot be used.
    """
    path = os.environ.get(TLS)
    if not path:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Ranks use a key and the job's secret to prove that they belong to the job; host names are not checked.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(path, password=lambda: _refuse_pass_phrase(path))
        context.load_verify_locations(path)
        status = os.stat(path)
        # Like ssh, check the permissions only of a key that this user owns: another user's key (such as root's in a
        # container) is that user's responsibility.
        if status.st_uid == os.getuid() and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise CommError(
                f"{TLS} is {path!r}, whose key is open to other users (mode {stat.S_IMODE(status.st_mode):04o}): run "
                f"`chmod go-rwx {path}`, and make a new key if others may have read it"
            )
    except OSError as error:
        raise CommError(f"{TLS} is {path!r}, which is no file with a key and its certificate: {error}") from error
    return context


def _refuse_pass_phrase(path: str) -> NoReturn:
    """Raise an error for a key with a pass phrase: OpenSSL would prompt for it on each rank, for each connection."""
    raise CommError(
        f"{TLS} is {path!r}, whose key has a pass phrase, which ranks cannot type: write the key without it "
        "(`openssl pkey -in key.pem`) into a file that you alone can read"
    )


def refuse_unencrypted(backend: str) -> None:
    """Raise `ValueError` if connections must be encrypted, because this backend opens connections without TLS."""
    if os.environ.get(TLS):
        raise ValueError(
            f"backend {backend!r} does not encrypt, and {TLS} is set: pass 'tcp' or 'shm+tcp', or unset it"
        )


def encrypted(connection: socket.socket, context: ssl.SSLContext | None, timeout: float | None = None) -> socket.socket:
    """Return the socket through which to talk to a peer: the near end of a relay, which takes over the connection.

    Args:
        connection: The connection. If `context` is not None, the relay takes over the connection's descriptor, and this
            socket object becomes unusable.
        context: Result of `tls_context`; if None, connections are not encrypted, and the result is the connection
            itself.
        timeout: Seconds to wait until the peer is trusted. If None, return at once; the relay closes the connection
            later if the peer is not trusted, and the returned socket then reports the end of the stream.

    Raises:
        OSError: The peer has no certificate that this rank trusts, does not speak TLS, or does not respond.
    """
    if context is None:
        return connection
    if not _relays:
        _relays.append(_TLSRelay())
    pipe = _relays[0].add(connection, context)
    if timeout is not None:
        try:
            pipe.trusted.result(timeout)
        except OSError as error:
            pipe.near.close()
            if isinstance(error, UntrustedError):
                raise
            raise OSError(f"TLS: {str(error) or 'no answer'}. {ADVICE}") from error
    return pipe.near


class EncryptedSocket(socket.socket):
    """The near end of a relay, with the addresses and options of the encrypted connection.

    Attributes:
        outage: Result of `unisono.control.sockets.outage`, once the relay has closed the connection; empty until then.
        failure: The error that has ended the connection.
    """

    def __init__(self, near: socket.socket, connection: socket.socket) -> None:
        self.outage = ""
        super().__init__(near.family, near.type, near.proto, near.detach())
        self.failure: OSError | None = None
        self._connection = connection
        self._addresses = connection.getsockname(), connection.getpeername()

    def getsockname(self) -> Any:
        return self._addresses[0]

    def getpeername(self) -> Any:
        return self._addresses[1]

    def getsockopt(self, level: int, *option: int) -> Any:
        return self._connection.getsockopt(level, *option)

    def setsockopt(self, level: int, *option: Any) -> None:
        self._connection.setsockopt(level, *option)


class _Pipe:
    """A connection to a peer, and a socket pair whose near end belongs to the rank.

    Attributes:
        near: The rank's socket.
        trusted: Future that completes once both sides trust each other, or fails with the error.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        near, self._far = socket.socketpair()
        self._connection = socket.socket(fileno=connection.detach())
        self.near = EncryptedSocket(near, self._connection)
        for end in (self._connection, self._far):
            end.setblocking(False)
        self.trusted: Future[None] = Future()
        self._arrived = ssl.MemoryBIO()
        self._to_send = ssl.MemoryBIO()
        server = context.protocol is ssl.PROTOCOL_TLS_SERVER
        self._tls = context.wrap_bio(self._arrived, self._to_send, server_side=server)
        # `_incoming` holds bytes to deliver to the rank, and `_outgoing` bytes to send to the peer.
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._peer_ended = False
        self._rank_ended = False
        self._deadline = clock.now() + _TRUST_WITHIN_S

    def watched(self) -> dict[socket.socket, int]:
        """Return the events to wait for, by socket; empty if nothing more can be moved."""
        reads = not self._peer_ended and len(self._incoming) < _BYTES
        takes = self.trusted.done() and not self._rank_ended and len(self._outgoing) < _BYTES
        return {
            self._connection: selectors.EVENT_READ * reads | selectors.EVENT_WRITE * bool(self._outgoing),
            self._far: selectors.EVENT_READ * takes | selectors.EVENT_WRITE * bool(self._incoming),
        }

    def move(self) -> None:
        """Move as many bytes as possible now.

        Raises:
            OSError: The connection or the rank's end has failed, or the peer is not trusted.
        """
        if not self._peer_ended and len(self._incoming) < _BYTES:
            data = _read(self._connection)
            self._peer_ended = data == b""
            self._arrived.write(data or b"")
        try:
            self._decrypt()
            if self.trusted.done() and not self._rank_ended and len(self._outgoing) < _BYTES:
                data = _read(self._far)
                self._rank_ended = data == b""
                self._tls.write(data or b"")
        finally:
            # Send even after an error: the alert that tells the peer why it is not trusted may be among these bytes.
            self._outgoing += self._to_send.read()
            _write(self._connection, self._outgoing, ended=self._rank_ended)
        _write(self._far, self._incoming, ended=self._peer_ended)

    def _decrypt(self) -> None:
        try:
            if not self.trusted.done():
                self._tls.do_handshake()
                self.trusted.set_result(None)
            while data := self._tls.read(_BYTES):
                self._incoming += data
            self._peer_ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            plain = error.reason == "WRONG_VERSION_NUMBER"
            if plain:
                # Send an alert: OpenSSL sends nothing to a peer that does not speak TLS, so the peer could not
                # distinguish a refusal from a lost rank.
                self._outgoing += _ALERT
            raise UntrustedError("the other side does not encrypt" if plain else error.reason or str(error)) from error
        if self._peer_ended and not self.trusted.done():
            raise ConnectionError("the connection was closed before the peer was trusted")

    def is_abandoned(self) -> bool:
        """Return whether the peer has failed to prove its identity in time, or the rank has closed its end."""
        if not self.trusted.done():
            return clock.now() > self._deadline
        if self._outgoing or not self._rank_ended:
            return False
        # `poll` reports a hang-up only if the rank has closed its end, not if it has only shut down sending.
        hung_up = select.poll()
        hung_up.register(self._far, 0)
        return bool(hung_up.poll(0))

    def is_idle(self) -> bool:
        """Return whether everything that the rank has written has been sent."""
        try:
            return self._rank_ended or not (self._outgoing or select.select([self._far], [], [], 0)[0])
        except ValueError:
            # The connection has been closed in the meantime.
            return True

    def close(self, error: OSError | None = None) -> None:
        """Close the connection and the relay's end; the rank's socket then reports the end of the stream."""
        # Set `failure` before closing the sockets, because readers check it when they see the end of the stream.
        self.near.failure = error
        if error is not None and not self.trusted.done():
            self.trusted.set_exception(error)
        # Set `outage` before the rank sees the end of the stream, because the rank then reads `outage`.
        self.near.outage = outage(self._connection, self.near.getpeername()[0], error)
        self._connection.close()
        self._far.close()


class _TLSRelay:
    """Thread that relays this process's connections."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._bell, self._ear = socket.socketpair()
        self._ear.setblocking(False)
        self._selector.register(self._ear, selectors.EVENT_READ)
        self._new: deque[_Pipe] = deque()
        self._pipes: set[_Pipe] = set()
        self._reported: set[str] = set()
        invalidate_after_fork(self)
        atexit.register(self._flush)
        threading.Thread(target=self._run, name="unisono tls", daemon=True).start()

    def add(self, connection: socket.socket, context: ssl.SSLContext) -> _Pipe:
        """Relay an additional connection."""
        pipe = _Pipe(connection, context)
        self._new.append(pipe)
        self._bell.send(b"!")
        return pipe

    def _run(self) -> None:
        while True:
            ready = {key.data for key, _ in self._selector.select(_TIDY_EVERY_S) if key.data is not None}
            _read(self._ear)
            while self._new:
                ready.add(self._new.popleft())
            for pipe in ready:
                self._serve(pipe)
            for pipe in [pipe for pipe in self._pipes if pipe.is_abandoned()]:
                self._drop(pipe, TimeoutError("no answer in time"))

    def _serve(self, pipe: _Pipe) -> None:
        self._pipes.add(pipe)
        try:
            pipe.move()
        except OSError as error:
            host = pipe.near.getpeername()[0]
            # Log once per host, because a host may retry many times.
            if isinstance(error, UntrustedError) and host not in self._reported:
                self._reported.add(host)
                _log.warning("TLS with %s: %s", pipe.near.getpeername(), error.reason)
            self._drop(pipe, error)
            return
        watched = pipe.watched()
        if not any(watched.values()):
            self._drop(pipe)
            return
        for end, events in watched.items():
            self._watch(pipe, end, events)

    def _watch(self, pipe: _Pipe, end: socket.socket, events: int) -> None:
        known = self._selector.get_map().get(end)
        if known is None and events:
            self._selector.register(end, events, pipe)
        elif known is not None and not events:
            self._selector.unregister(end)
        elif known is not None and known.events != events:
            self._selector.modify(end, events, pipe)

    def _drop(self, pipe: _Pipe, error: OSError | None = None) -> None:
        for end in pipe.watched():
            self._watch(pipe, end, 0)
        self._pipes.remove(pipe)
        pipe.close(error)

    def _flush(self) -> None:
        # Only wait: the relay's thread does the sending.
        clock.poll_until(lambda: all(pipe.is_idle() for pipe in tuple(self._pipes)), clock.now() + _FLUSH_S, spins=1)

    def invalidate_after_fork(self) -> None:
        """Close every descriptor in a forked child, where the relay thread does not exist."""
        _relays.clear()
        for pipe in (*self._pipes, *self._new):
            pipe.close()
        self._bell.close()
        self._ear.close()


_relays: list[_TLSRelay] = []
"""This process's relay, if it has encrypted connections: one thread for all communicators."""


def _read(end: socket.socket) -> bytes | None:
    """Return the bytes that can be read now: empty at end of stream, None if nothing has arrived."""
    try:
        return end.recv(_BYTES)
    except BlockingIOError:
        return None


def _write(end: socket.socket, pending: bytearray, *, ended: bool) -> None:
    """Send and remove as many bytes as possible now; if `ended`, shut down sending after the last byte."""
    if pending:
        with suppress(BlockingIOError):
            del pending[: end.send(pending)]
    if ended and not pending:
        # The peer may already have closed the connection.
        with suppress(OSError):
            end.shutdown(socket.SHUT_WR)
