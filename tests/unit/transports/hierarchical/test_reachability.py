"""Hosts meet although strangers knock, which send nothing, half of the proof, or a wrong one."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from waiting import wait_until

from unisono import serialization
from unisono.control import LocalHub
from unisono.control import handshake as module
from unisono.control.handshake import Acceptor
from unisono.control.sockets import HELLO_BYTES, PROOF_BYTES, Hello
from unisono.core.frames import FrameChannel
from unisono.core.group import Group
from unisono.errors import CommError
from unisono.transports.hierarchical.reachability import check_reachability

SOON_S = 20.0
SECRET = b"the secret"


class Door:
    """An acceptor with its event loop."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self._selector = listener, selectors.DefaultSelector()
        self._acceptor = Acceptor(listener, SECRET, self._selector)

    def admitted(self, within_s: float) -> list[tuple[int | None, socket.socket, FrameChannel]]:
        """The clients that this round of events admits."""
        found = []
        for key, _ in self._selector.select(within_s):
            if key.fileobj is self._listener:
                self._acceptor.accept()
            elif (channel := self._acceptor.advance(key.data)) is not None:
                found.append((key.data.rank, key.data.peer, channel))
        self._acceptor.tidy()
        return found

    def close(self) -> None:
        self._acceptor.close()
        self._selector.close()


@contextlib.contextmanager
def listening() -> Iterator[tuple[Door, Any]]:
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.closing(Door(listener)) as door:
        yield door, listener.getsockname()[:2]


@contextlib.contextmanager
def knocking(address: Any, *words: bytes) -> Iterator[list[socket.socket]]:
    """A connection for each of these words, which says no more than that."""
    with contextlib.ExitStack() as stack:
        made = []
        for said in words:
            made.append(stack.enter_context(socket.create_connection(address, SOON_S)))
            made[-1].sendall(said)
        yield made


def hung_up(line: socket.socket) -> bool:
    line.setblocking(False)
    try:
        while line.recv(1000):
            continue
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    return True


def proof(line: socket.socket, secret: bytes, rank: int) -> bytes:
    """Return the last message of a client, after sending its hello."""
    greeting = Hello(secret, client=True, rank=rank)
    line.settimeout(SOON_S)
    line.sendall(greeting.hello)
    greeting.meet(line.recv(HELLO_BYTES, socket.MSG_WAITALL))
    line.recv(PROOF_BYTES, socket.MSG_WAITALL)
    return greeting.proof()


def enter(door: Door, address: Any, rank: int, more: bytes = b"") -> tuple[int | None, bytes]:
    """The rank that is admitted, and the bytes that the handshake has left to its reader."""
    done = threading.Event()

    def come() -> None:
        with socket.create_connection(address, SOON_S) as line:
            line.sendall(proof(line, SECRET, rank) + more)
            done.wait(SOON_S)

    client = threading.Thread(target=come)
    client.start()
    found: list[Any] = []
    while not found:
        found = door.admitted(SOON_S)
    ((number, peer, _),) = found
    peer.setblocking(True)
    with peer:
        said = peer.recv(100) if more else b""
    done.set()
    client.join()
    return number, said


def test_silent_connections_do_not_delay_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    # No client may be admitted only because another one timed out.
    monkeypatch.setattr(module, "_WITHIN_S", 1000.0)
    hub, ends = LocalHub(), dict[int, Any]()

    def be(rank: int) -> None:
        group, control = Group.world(rank, 3), hub.control()
        try:
            ends[rank] = check_reachability(group, control, [[0], [1], [2]], "127.0.0.1", SOON_S)
        except CommError as error:
            ends[rank] = error

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(3)]
    threads[0].start()
    watcher = hub.control()
    address = serialization.decode(watcher.get(f"{Group.world(0, 3).name}/hosts at 0", SOON_S))
    hello = Hello(SECRET, client=True).hello
    with knocking(address, b"", hello[:-1], bytes(HELLO_BYTES), hello, b""), knocking(address, b"") as (wrong,):
        wrong.sendall(proof(wrong, SECRET, 1))
        for thread in threads[1:]:
            thread.start()
        for thread in threads:
            thread.join(2 * SOON_S)
    assert ends == dict.fromkeys(range(3))


@pytest.mark.parametrize("length", [0, 8, HELLO_BYTES - 1, HELLO_BYTES])
def test_late_handshake_is_disconnected(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    hello = Hello(SECRET, client=True).hello
    with listening() as (door, address):
        with monkeypatch.context() as patch, knocking(address, hello[:length]) as (line,):
            patch.setattr(module, "_WITHIN_S", 0.05)
            assert wait_until(lambda: door.admitted(0.02) == [] and hung_up(line))
        assert enter(door, address, 3) == (3, b"")


def test_many_connections_do_not_block_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_PENDING", 4)
    with listening() as (door, address), knocking(address, *[b""] * 10) as lines:
        assert wait_until(lambda: door.admitted(0.02) == [] and list(map(hung_up, lines)) == [True] * 6 + [False] * 4)
        assert enter(door, address, 5, b"what comes after") == (5, b"what comes after")


def test_wrong_proof_is_disconnected_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WITHIN_S", 1000.0)
    with listening() as (door, address), knocking(address, b"") as (line,):
        saying = threading.Thread(target=lambda: line.sendall(proof(line, SECRET[::-1], 1)))
        saying.start()
        assert wait_until(lambda: door.admitted(0.02) == [] and not saying.is_alive())
        assert wait_until(lambda: door.admitted(0.02) == [] and hung_up(line))


def test_host_that_cannot_listen_is_named_on_every_host() -> None:
    hub, ends = LocalHub(), dict[int, Any]()

    def be(rank: int, address: str) -> None:
        try:
            check_reachability(Group.world(rank, 3), hub.control(), [[0], [1], [2]], address, SOON_S)
        except CommError as error:
            ends[rank] = error

    addresses = ["127.0.0.1", "203.0.113.7", "127.0.0.1"]
    threads = [threading.Thread(target=be, args=placed) for placed in enumerate(addresses)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SOON_S)
    assert ["rank 1 cannot listen at 203.0.113.7:0" in str(ends.get(rank)) for rank in range(3)] == [True] * 3
