"""The networked control plane: a daemon thread that serves every rank of a job."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import selectors
import socket
import threading
from collections.abc import Callable
from selectors import EVENT_READ

from unisono import serialization
from unisono.control.encryption import tls_context
from unisono.control.handshake import Acceptor, Handshake
from unisono.control.inspect_socket import InspectSocket
from unisono.control.replies import Outgoing, Reply, failed
from unisono.control.sockets import (
    check_platform,
    limit_silence,
    listen,
    outage,
)
from unisono.control.state import ControlState
from unisono.core import clock
from unisono.core.failure import Cause
from unisono.core.forks import invalidate_after_fork
from unisono.core.frames import MAX_FRAME_BYTES, Frame, FrameChannel, Kind
from unisono.host.network import host_in, is_name

__all__ = ["Connection", "ControlServer"]

_log = logging.getLogger(__name__)

_FLUSH_WITHIN_S = 1.0


class ControlServer:
    """Server that listens on an address, and serves clients that know the secret.

    Args:
        secret: The secret that every client must know.
        host: An address of this host to listen on (by default, the IPv4 loopback address), or a name of this host, to
            listen on all of its addresses.
        port: 0 selects any free port.
        on_left: Called in the server's thread with the label of a client that has left or disappeared; see
            `SocketControl.identify`.
        restarts: See `ControlState`.
        state: Class of the state machine that answers requests.

    Attributes:
        address: Host and port.

    Raises:
        CommError: Listening on the address failed; the message gives the reason and the fix.
        UnavailableError: On Windows.

    Example:
        >>> from unisono.control.client import SocketControl
        >>> server = ControlServer(b"a secret")
        >>> control = SocketControl(server.address, b"a secret", timeout=5.0)
        >>> control.set("colour", b"blue")
        >>> control.get("colour", timeout=1.0)
        b'blue'
        >>> control.close()
        >>> server.close()
    """

    def __init__(
        self,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        on_left: Callable[[str], None] = lambda label: None,
        *,
        restarts: bool = False,
        state: type[ControlState] = ControlState,
    ) -> None:
        check_platform()
        # Check the TLS settings first, so that errors in these settings are raised before anything is open.
        tls_context(server=True)
        self._listener = listen(host, port)
        bound = self._listener.getsockname()
        # If `host` is a name, clients get the name, because each may resolve it differently; the socket listens on all
        # addresses.
        self.address: tuple[str, int] = (host if is_name(host) else host_in(bound), bound[1])
        self._state = state(on_left=on_left, restarts=restarts)
        self._known: dict[int, Connection] = {}
        self._news: dict[int, Connection] = {}
        self._broken: list[Connection] = []
        self._numbers = itertools.count(1)
        self._end_at: float | None = None
        self._ended = False
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wakeup_sender, self._wakeup_receiver = socket.socketpair()
        self._inspect_socket = InspectSocket(self.address, secret)
        self._acceptor = Acceptor(self._listener, secret, self._selector, self._state.refused)
        for listening in (self._wakeup_receiver, self._inspect_socket.socket):
            if listening is not None:
                listening.setblocking(False)
                self._selector.register(listening, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="unisono control server", daemon=True)
        self._thread.start()
        invalidate_after_fork(self)

    def retire(self, patience_s: float) -> None:
        """Shut down once no client is left, or after `patience_s` seconds. Returns immediately."""
        with self._lock:
            self._end_at = clock.now() + patience_s
        # The thread may already have ended and closed the sockets.
        with contextlib.suppress(OSError):
            self._wakeup_sender.send(b"!")

    def stay(self) -> bool:
        """Cancel a shutdown that `retire` has requested; return False if the server has already shut down."""
        with self._lock:
            self._end_at = None
            return not self._ended

    def close(self, patience_s: float = 0.0) -> None:
        """Send clients a goodbye, so that they do not report a lost server, and shut down. Idempotent.

        Clients that are still connected get up to `patience_s` seconds to leave first.
        """
        self.retire(patience_s)
        self._thread.join(patience_s + _FLUSH_WITHIN_S + 1.0)

    # -- the thread ----------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while not self._over():
                for key, events in self._selector.select(self._nap_s()):
                    if key.fileobj is self._listener:
                        self._acceptor.accept()
                    elif key.fileobj is self._wakeup_receiver:
                        self._wakeup_receiver.recv(4096)
                    elif key.fileobj is self._inspect_socket.socket:
                        self._inspect_socket.answer()
                    elif isinstance(key.data, Handshake):
                        self._admit(key.data)
                    else:
                        self._serve(key.data, events)
                self._acceptor.tidy()
                while self._broken:
                    self._drop(self._broken.pop())
            self._send_goodbye()
        finally:
            self._ended = True
            self.invalidate_after_fork()

    def _over(self) -> bool:
        with self._lock:
            over = self._end_at is not None and (not self._known or clock.now() >= self._end_at)
            self._ended = self._ended or over
            return over

    def _nap_s(self) -> float | None:
        # Read `_end_at` only once, because `stay` may set it to None in another thread at any time.
        end_at = self._end_at
        left_s = None if end_at is None else max(0.0, end_at - clock.now())
        return min((wait for wait in (left_s, self._acceptor.wait_s()) if wait is not None), default=None)

    def _admit(self, handshake: Handshake) -> None:
        channel = self._acceptor.advance(handshake)
        if channel is not None:
            connection = Connection(next(self._numbers), handshake.peer, channel)
            self._known[connection.number] = connection
            self._selector.register(connection.peer, connection.watched, connection)

    def _serve(self, connection: Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                connection.flush()
            frames = connection.read() if events & selectors.EVENT_READ else []
            for frame in frames:
                if frame.kind is Kind.CALL:
                    self._deliver(self._state.called(connection.number, frame.content))
                else:
                    self._handle(connection, frame.content)
            self._watch(connection)
        # Whatever a client sends, or fails to send, may end only its own connection, not the server.
        except Exception as error:
            _log.debug("control connection %d ended: %s", connection.number, error)
            connection.error = error
            self._broken.append(connection)

    def _handle(self, connection: Connection, content: bytes) -> None:
        request, words = serialization.decode(content)
        if words == ("number",):
            self._deliver([(connection.number, (request, "ok", connection.number))])
        elif words[0] == "news":
            # This is a client's second connection, which carries unsolicited messages.
            connection.serves = words[1]
            self._news[connection.serves] = self._known.pop(connection.number)
            self._deliver([(connection.serves, (request, "ok", None))])
        elif words[0] == "heartbeat":
            self._news[connection.number].limit_silence(words[1])
            self._deliver([(connection.number, (request, "ok", None))])
        else:
            self._deliver(self._state.handle(connection.number, request, words))

    def _deliver(self, out: Outgoing) -> None:
        for client, reply in out:
            connection = (self._known if reply[0] else self._news).get(client)
            if connection is None:
                continue
            if reply[1] == "asked" and (away := connection.outage()):
                # Don't send the query to an unreachable host: bytes in flight would restart the heartbeat's timer.
                answer = serialization.encode({"outage": away})
                self._deliver(self._state.handle(client, 0, ("answer", reply[2], answer)))
            else:
                try:
                    connection.write(*_encoded(reply))
                    self._watch(connection)
                except OSError as error:
                    connection.error = error
                    self._broken.append(connection)

    def _watch(self, connection: Connection) -> None:
        """Make the selector report when unsent bytes can be sent, if there are any."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if connection.watched != events:
            connection.watched = events
            self._selector.modify(connection.peer, events, connection)

    def _drop(self, connection: Connection) -> None:
        """Close a client's connections after one has ended, and report it as lost to the groups that it is still in."""
        known = self._known.pop(connection.serves, None)
        news = self._news.pop(connection.serves, None)
        away = "" if news is None else news.outage()
        for ending in (known, news):
            if ending is not None:
                self._selector.unregister(ending.peer)
                ending.peer.close()
        if known is not None:
            self._deliver(self._state.lost(known.number, away))

    def _send_goodbye(self) -> None:
        deadline = clock.now() + _FLUSH_WITHIN_S
        for news in self._news.values():
            with contextlib.suppress(OSError):
                news.write(*_encoded((0, "goodbye", None)))
        for connection in (*self._news.values(), *self._known.values()):
            if connection.unsent:
                with contextlib.suppress(OSError):
                    # The timeout limits all of `sendall`; 0.0 allows one attempt, which does not wait.
                    connection.peer.settimeout(max(0.0, deadline - clock.now()))
                    connection.peer.sendall(connection.unsent)

    def invalidate_after_fork(self) -> None:
        """Close every descriptor."""
        for connection in (*self._known.values(), *self._news.values()):
            connection.peer.close()
        for held in (
            self._acceptor,
            self._listener,
            self._wakeup_sender,
            self._wakeup_receiver,
            self._inspect_socket,
            self._selector,
        ):
            held.close()


def _encoded(reply: Reply) -> tuple[Kind, bytes]:
    if not reply[0]:
        return Kind.NEWS, json.dumps(reply[1:]).encode()
    content = serialization.encode(reply)
    if len(content) <= MAX_FRAME_BYTES:
        return Kind.REPLY, content
    message = f"the values of all ranks together have {len(content) >> 20} MiB, more than the {MAX_FRAME_BYTES >> 20} "
    refusal = Cause("CommError", None, message + "that the control plane sends in one message")
    return Kind.REPLY, serialization.encode(failed(reply[0], refusal))


_MAX_UNREAD_BYTES = 256 << 20


class Connection:
    """Connection of an authenticated client, with a non-blocking socket.

    Attributes:
        serves: Number of the client, which is the `number` of its first connection.
        watched: Socket events that the selector reports for this connection.
        unsent: Bytes that are queued because the client has not yet read earlier bytes.
        error: The error that has ended the connection.
    """

    def __init__(self, number: int, peer: socket.socket, channel: FrameChannel) -> None:
        self.number = number
        self.peer = peer
        self._channel = channel
        self.serves = number
        self.error: Exception | None = None
        self._host = ""
        self.watched = EVENT_READ
        self.unsent: bytearray = bytearray()

    def limit_silence(self, seconds: float) -> None:
        """End the connection once the client's host has been silent for `seconds`."""
        self._host = self.peer.getpeername()[0]
        limit_silence(self.peer, seconds)

    def outage(self) -> str:
        """Return how long the client's host has been silent, as a sentence; empty if it responds or no limit is set."""
        return outage(self.peer, self._host, self.error) if self._host else ""

    def read(self) -> list[Frame]:
        """Return the requests that have arrived. Raises `ConnectionError` if the connection has ended."""
        return self._channel.available(self.peer, Kind.REQUEST, Kind.CALL)

    def write(self, kind: Kind, content: bytes) -> None:
        """Send a frame, now or once the peer has read earlier frames.

        Raises `OSError` if the connection has ended, or if the peer leaves too many bytes unread.
        """
        self.unsent += self._channel.encode(kind, content)
        if len(self.unsent) > _MAX_UNREAD_BYTES:
            raise ConnectionError("the peer does not read what is sent to it")
        self.flush()

    def flush(self) -> None:
        """Send as much as possible now."""
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                sent = self.peer.send(self.unsent)
                del self.unsent[:sent]
