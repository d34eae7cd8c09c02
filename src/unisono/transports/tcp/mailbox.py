"""Mailbox over dedicated connections: for tcp, and for transports whose messages cannot be polled, such as gloo."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch

from unisono.control.mesh import Link, Mesh, say_farewell
from unisono.core import clock
from unisono.core.control import ControlPlane
from unisono.core.forks import invalidate_after_fork
from unisono.core.frames import READ_BYTES, FrameChannel, Kind
from unisono.core.group import Group
from unisono.core.mail import pack, parse
from unisono.core.tensors import view_of
from unisono.core.transport import Envelope, Mailbox
from unisono.errors import CommError, CommTimeoutError, PeerLostError

__all__ = ["TcpMailbox", "meet"]

T = TypeVar("T")

_SLICE_S = 0.1
_MOST_VECTORS = 64


def _read(peer: int, connection: socket.socket, channel: FrameChannel, arrived: list[Envelope]) -> Iterator[None]:
    """Append a peer's messages as they arrive; yield while there is nothing to read.

    Raises EOFError at the end of the connection, and ValueError for invalid data.
    """
    drained = False
    while True:
        # Read each message in a generator of its own, so that this one keeps no message alive until the next arrives.
        drained = yield from _read_message(peer, connection, channel, arrived, drained)


def _read_message(
    peer: int, connection: socket.socket, channel: FrameChannel, arrived: list[Envelope], drained: bool
) -> Generator[None, None, bool]:
    """Append the next message: a frame, after which its bodies are read into new memory.

    After a short read, nothing is left to read, so don't spend another system call on it: `drained`, and the result,
    tell whether the latest read was short.
    """
    while (frame := channel.next(Kind.MAIL)) is None:
        if drained:
            yield None
        data = yield from _arriving(lambda: connection.recv(READ_BYTES))
        drained = len(data) < READ_BYTES
        channel.feed(data)
    message, end = parse(peer, frame.content)
    if message is None or end != len(frame.content):
        raise ValueError("a message is not as long as its header says")
    for body in message.bodies:
        rest = view_of(body)
        rest = rest[channel.take(rest) :]
        while rest:
            step = yield from _arriving(partial(connection.recv_into, rest))
            drained = step < READ_BYTES
            rest = rest[step:]
    arrived.append(message)
    return drained


def _arriving(receive: Callable[[], T]) -> Generator[None, None, T]:
    """Return what `receive` returns; yield while nothing has arrived. Raises EOFError if nothing more will arrive."""
    while True:
        try:
            received = receive()
        except BlockingIOError:
            yield None
        else:
            if not received:
                raise EOFError
            return received


class TcpMailbox(Mailbox):
    """Mailbox over one connection per pair of ranks. Both ends prove that they know the job's secret.

    As on the control plane, each message's header, which contains function names and sizes, is authenticated; the bytes
    of long tensors are not. Nothing is encrypted unless UNISONO_TLS is set. No port remains open once all ranks are
    connected.

    Cost: one system call to send a message, and two to receive it.
    """

    def __init__(self, group: Group, control: ControlPlane, address: str, timeout_s: float) -> None:
        super().__init__(group)
        links = meet(group, control, address, timeout_s)
        self._links = links
        self._locks = {peer: threading.Lock() for peer in links}
        self._arrived: list[Envelope] = []
        self._streams = {
            connection.fileno(): (peer, _read(peer, connection, channel, self._arrived))
            for peer, (connection, channel) in links.items()
        }
        self._wakeup_sender, self._wakeup_receiver = socket.socketpair()
        self._watch = select.poll()
        for connection in (self._wakeup_sender, self._wakeup_receiver):
            connection.setblocking(False)
        for number in (self._wakeup_receiver.fileno(), *self._streams):
            self._watch.register(number, select.POLLIN)
        self._ready: list[int] = []
        invalidate_after_fork(self)

    # -- sending -------------------------------------------------------------------------------
    def send(self, peer: int, head: bytes, bodies: Sequence[torch.Tensor], timeout: float) -> None:
        connection, channel = self._links[peer]
        message = pack(head, bodies)
        with self._locks[peer]:
            self.check(peer)
            frame = channel.encode(Kind.MAIL, message)
            try:
                # Send everything in one system call, so that the receiver does not wake up for the header alone.
                self._send_all(
                    connection, peer, [memoryview(frame), *(view_of(b) for b in bodies if b.numel())], timeout
                )
            except BaseException as error:
                if isinstance(error, OSError) and not isinstance(error, CommError):
                    self.mark_lost(peer, PeerLostError(f"the connection to rank {peer} has ended: {error}", peer=peer))
                    self.check(peer)
                self.abort_message(peer, error)
                raise

    def _send_all(self, connection: socket.socket, peer: int, rest: list[memoryview], timeout: float) -> None:
        deadline = clock.now() + timeout
        while rest:
            try:
                sent = connection.sendmsg(rest[:_MOST_VECTORS])
            except BlockingIOError:
                self._make_room(connection, peer, deadline)
                continue
            while sent:
                step = min(sent, len(rest[0]))
                rest[0] = rest[0][step:]
                sent -= step
                if not rest[0]:
                    rest.pop(0)

    def _make_room(self, connection: socket.socket, peer: int, deadline: float) -> None:
        """Wait until the receiver has read some bytes."""
        self.on_stall()
        watch = select.poll()
        if connection.fileno() >= 0:
            watch.register(connection.fileno(), select.POLLOUT)
        if not watch.poll(_SLICE_S * 1000):
            self.check(peer)
            if clock.now() > deadline:
                raise CommTimeoutError(f"rank {peer} does not receive messages. Is it stopped?", peer=peer)

    # -- receiving -----------------------------------------------------------------------------
    def poll(self) -> list[Envelope]:
        if self.closed:
            return []
        ready = self._ready
        self._ready = []
        for number in ready or [number for number, _ in self._watch.poll(0)]:
            if number == self._wakeup_receiver.fileno():
                with contextlib.suppress(BlockingIOError):
                    self._wakeup_receiver.recv(4096)
            elif number in self._streams:
                self._read(number)
        envelopes = self._arrived.copy()
        self._arrived.clear()
        return envelopes

    def _read(self, number: int) -> None:
        peer, reader = self._streams[number]
        try:
            next(reader)
        except EOFError:
            error = PeerLostError(f"rank {peer} has closed its connection: it died, or shut down", peer=peer)
        except (OSError, ValueError, MemoryError) as failure:
            error = PeerLostError(f"the connection to rank {peer} has failed: {failure}", peer=peer)
        else:
            return
        self._watch.unregister(number)
        del self._streams[number]
        self.mark_lost(peer, error)

    def wait(self, timeout: float) -> None:
        if not self._ready and not self.closed:
            self._ready = [number for number, _ in self._watch.poll(max(timeout, 0.0) * 1000)]

    def wake(self) -> None:
        # Ignore a failed send: if the socket pair is full, the receiver wakes up anyway; if it is closed, nobody is
        # waiting.
        with contextlib.suppress(OSError):
            self._wakeup_sender.send(b"!")

    # -- end -----------------------------------------------------------------------------------
    def release(self) -> None:
        say_farewell([connection for connection, _ in self._links.values()])
        self.invalidate_after_fork()

    def invalidate_after_fork(self) -> None:
        """Close all sockets in a forked child."""
        for connection, _ in self._links.values():
            connection.close()
        self._wakeup_sender.close()
        self._wakeup_receiver.close()


def meet(
    group: Group,
    control: ControlPlane,
    address: str,
    timeout: float,
    topic: str = "mail",
    apart: Collection[int] = (),
) -> dict[int, Link]:
    """Connect to every other rank, except the ranks `apart`. Joins the group. Collective.

    Raises:
        CommTimeoutError: Not all ranks have joined.
        CommError: A process that is not a rank of this group answered, or the group has failed.
    """

    def conclude(problems: list[CommError]) -> None:
        if problems:
            raise problems[0]
        control.exchange(group, topic, None, timeout)

    mesh = Mesh(group, control, f"{group.name}/{topic}", range(group.size), address, apart)
    return mesh.connect(timeout, timeout, conclude)
