"""Tagged messages over sockets: a TCP connection to each other rank, and a socket pair to this rank itself."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Mapping, Sequence

from unisono.control.mesh import say_farewell
from unisono.core import clock
from unisono.core.failure import connection_error, left_error
from unisono.core.forks import invalidate_after_fork
from unisono.core.types import Message
from unisono.core.work import CountdownWork, missing_ranks_error
from unisono.errors import CommError
from unisono.transports.tagged_messages import FAREWELL, HEADER_BYTES, Incoming, Outgoing, TaggedMessages

__all__ = ["Stream", "TcpMessages"]

_BUFFER_BYTES = 64 << 10
_SLICE_S = 0.1


class Stream:
    """One end of a connection, as an implementation of `Bytes`.

    Args:
        connection: A non-blocking connection.

    Attributes:
        left: Whether the peer has sent its farewell, which follows its last message.
        lost: Whether the connection has ended, with or without a farewell.
    """

    __slots__ = ("_at", "_buffer", "_connection", "_end", "_held", "left", "lost")

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._held = b""
        self.left: bool = False
        self.lost: bool = False
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._at = self._end = 0

    @property
    def available(self) -> int:
        """Number of bytes that can be read now."""
        if self._at == self._end:
            self._at = self._end = 0
            self._fill()
        return self._end - self._at

    @property
    def buffered(self) -> bool:
        """Whether bytes of the next message are already in the buffer."""
        return self._at < self._end

    def write(self, content: bytes | memoryview, more: bool = False) -> int:
        """Implement `Bytes`."""
        if more:
            self._held = bytes(content)
            return len(content)
        try:
            sent = self._connection.sendmsg([self._held, content] if self._held else [content])
        except BlockingIOError:
            return 0
        except OSError:
            self.lost = True
            return 0
        ours = min(sent, len(self._held))
        self._held = self._held[ours:]
        return sent - ours

    def peek(self) -> memoryview:
        """Return the buffered bytes without consuming them. If these don't fill a header, first read more bytes."""
        if self._end - self._at < HEADER_BYTES:
            rest = bytes(self._buffer[self._at : self._end])
            self._buffer[: len(rest)] = rest
            self._at = 0
            self._end = len(rest)
            self._fill()
        if self._buffer[self._at : self._end][:HEADER_BYTES] == FAREWELL:
            self.left = self.lost = True
            return self._buffer[:0]
        return self._buffer[self._at : self._end]

    def skip(self, nbytes: int) -> None:
        """Implement `Bytes`."""
        self._at += nbytes

    def read(self, into: memoryview) -> int:
        """Implement `Bytes`."""
        step = min(len(into), self._end - self._at)
        into[:step] = self._buffer[self._at : self._at + step]
        self._at += step
        if step < len(into):
            step += self._receive(into[step:])
        return step

    def _fill(self) -> None:
        self._end += self._receive(self._buffer[self._end :])

    def _receive(self, into: memoryview) -> int:
        try:
            count = self._connection.recv_into(into) if not self.lost else 0
        except BlockingIOError:
            return 0
        except OSError:
            count = 0
        self.lost = self.lost or not count
        return count


def _pair() -> Sequence[socket.socket]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    return ends


class TcpMessages(TaggedMessages):
    """Messages over connections. One of the waiting threads moves the messages to and from all peers.

    Args:
        rank: This rank.
        connections: Non-blocking connections to the other ranks, by rank. `close` closes them.
    """

    def __init__(self, rank: int, connections: Mapping[int, socket.socket]) -> None:
        self._streams = {peer: Stream(connection) for peer, connection in connections.items()}
        super().__init__(self._streams, self._streams, rank)
        self._rank = rank
        # Two socket pairs, created on demand: one for messages to this rank itself, and one to wake the polling thread.
        self._own: Sequence[socket.socket] = ()
        self._bell: Sequence[socket.socket] = ()
        self._connections = dict(connections)
        # `_polls` is set while one thread polls the connections; all other threads wait on `_turn`.
        self._turn = threading.Condition(threading.Lock())
        self._polls = False
        invalidate_after_fork(self)

    def post(self, batch: Sequence[Message], timeout_s: float) -> CountdownWork:
        work = super().post(batch, timeout_s)
        if self._polls:
            self._ring()
        return work

    def open(self, peer: int) -> None:
        """Create the socket pair for this rank's messages to itself, before the first such message."""
        if peer not in self._out:
            self._own = _pair()
            to_oneself, from_oneself = map(Stream, self._own)
            self._out[peer] = Outgoing(to_oneself)
            self._in[peer] = Incoming(from_oneself, peer, peer)

    def sockets(self, size: int) -> list[int]:
        """Return the connections' descriptors, by rank, with -1 for this rank."""
        return [self._connections[peer].fileno() if peer != self._rank else -1 for peer in range(size)]

    def has_read(self, peer: int, tag: int) -> bool:
        return super().has_read(peer, tag) or self._streams[peer].buffered

    def wait(self, deadline: float, done: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        started = clock.now()
        with self._turn:
            if self._polls:
                self._turn.wait(min(_SLICE_S, max(0.0, deadline - started)))
                polls = False
            else:
                polls = self._polls = True
        try:
            if polls and not self.move() and not done():
                self._poll(min(_SLICE_S, max(0.0, deadline - started)))
                self.move()
        finally:
            if polls:
                with self._turn:
                    self._polls = False
                    self._turn.notify_all()
        if not done():
            self.check(done, missing)
            if clock.now() > deadline:
                raise missing_ranks_error(clock.now() - started, missing())

    def _poll(self, timeout_s: float) -> None:
        self._bell = self._bell or _pair()
        ear = self._bell[1]
        events = {ear.fileno(): select.POLLIN}
        with self.lock:
            for peers, event in ((self._sending, select.POLLOUT), (self._receiving, select.POLLIN)):
                for peer in peers:
                    end = self._end(peer, sends=event == select.POLLOUT)
                    if end >= 0:
                        events[end] = events.get(end, 0) | event
        watch = select.poll()
        for end, event in events.items():
            watch.register(end, event)
        watch.poll(timeout_s * 1000)
        with contextlib.suppress(OSError):
            ear.recv(4096)

    def _end(self, peer: int, *, sends: bool) -> int:
        """Return the descriptor of the connection to a rank, or -1 if the connection has ended."""
        if peer == self._rank:
            return self._own[0 if sends else 1].fileno()
        return -1 if self._streams[peer].lost else self._connections[peer].fileno()

    def end_of(self, peer: int) -> CommError | None:
        stream = self._streams.get(peer)
        if stream is None or not stream.lost:
            return None
        return left_error(peer) if stream.left else connection_error(peer)

    def _ring(self) -> None:
        # Ignore a failed send: if the socket pair is full, the thread wakes up anyway; if it is closed, no thread is
        # polling. If there is no pair yet, the polling thread has not collected the connections to poll, and will find
        # the new messages.
        with contextlib.suppress(OSError):
            for bell in self._bell[:1]:
                bell.send(b"!")

    def abort(self, cause: BaseException) -> None:
        super().abort(cause)
        self._ring()

    def leave(self) -> None:
        """Notify the other ranks that this rank sends no more messages. Messages already sent still arrive."""
        for peer, connection in self._connections.items():
            # Ignore errors: the peer may already have closed the connection.
            with contextlib.suppress(OSError):
                if not self._out[peer].pending:
                    connection.send(FAREWELL)
                connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close all connections. Idempotent."""
        say_farewell(list(self._connections.values()), self.broken)
        self.invalidate_after_fork()

    def invalidate_after_fork(self) -> None:
        """Close all sockets in a forked child."""
        for end in (*self._connections.values(), *self._own, *self._bell):
            end.close()
