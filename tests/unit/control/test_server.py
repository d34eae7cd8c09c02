"""The control plane among strangers, liars and the slow."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from unisono import serialization
from unisono.control import handshake
from unisono.control.client import SocketControl, connect
from unisono.control.server import ControlServer
from unisono.control.sockets import HELLO_BYTES, Hello
from unisono.core.frames import Frame, Kind
from unisono.core.group import Group
from unisono.errors import CommError, CommTimeoutError

SECRET = b"of the tests"
SOON = 10.0

Start = Callable[..., "subprocess.Popen[str]"]


def works(control: SocketControl) -> bool:
    control.set("works", b"yes")
    return control.get("works", SOON) == b"yes"


def everything(peer: socket.socket) -> bytes:
    """Return the data received before the other side closes the connection."""
    peer.settimeout(SOON)
    data = b""
    try:
        while more := peer.recv(4096):
            data += more
    except ConnectionResetError:
        pass
    return data


# -- strangers -------------------------------------------------------------------------------------
@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2, bytes(100), os.urandom(5000)])
def test_garbage_gets_no_reply(server: ControlServer, client: SocketControl, garbage: bytes) -> None:
    with socket.create_connection(server.address) as stranger:
        stranger.sendall(garbage)
        assert everything(stranger) == b""
    assert works(client)


def test_other_version_is_refused_in_a_sentence(server: ControlServer) -> None:
    with socket.create_connection(server.address) as newer:
        newer.sendall(b"unisono9" + bytes(HELLO_BYTES - 8))
        # What the newer one needs to say which versions there are.
        assert everything(newer).startswith(b"unisono3")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: answer_once(listener, b"unisono9" + bytes(HELLO_BYTES - 8)))
        thread.start()
        with pytest.raises(CommError, match="speaks protocol 9 of unisono, and this rank protocol 3; install the same"):
            connect(listener.getsockname(), SECRET, SOON)
        thread.join()


def answer_once(listener: socket.socket, answer: bytes) -> None:
    peer, _ = listener.accept()
    with peer:
        peer.sendall(answer)
        everything(peer)


def test_wrong_proof_closes_the_connection(server: ControlServer, client: SocketControl) -> None:
    greeting = Hello(b"a guess", client=True)
    with socket.create_connection(server.address) as stranger:
        stranger.sendall(greeting.hello)
        greeting.meet(stranger.recv(HELLO_BYTES))
        stranger.sendall(greeting.proof())
        # Only the server's own proof comes.
        assert len(everything(stranger)) == 32
    assert works(client)


def test_silent_connection_is_closed(
    monkeypatch: pytest.MonkeyPatch, server: ControlServer, client: SocketControl
) -> None:
    monkeypatch.setattr(handshake, "_WITHIN_S", 0.1)
    with socket.create_connection(server.address) as stranger:
        assert everything(stranger) == b""
    assert works(client)


def test_excess_unauthenticated_connections_are_closed(
    monkeypatch: pytest.MonkeyPatch, server: ControlServer, client: SocketControl
) -> None:
    monkeypatch.setattr(handshake, "_MAX_PENDING", 3)
    strangers = [socket.create_connection(server.address) for _ in range(5)]
    assert [everything(stranger) for stranger in strangers[:2]] == [b"", b""]
    assert works(client)
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("how", ["repeated", "changed", "no value", "no request", "of another kind", "too long"])
def test_bad_frame_closes_only_its_connection(server: ControlServer, client: SocketControl, how: str) -> None:
    peer, channel = handshake.connect(server.address, SECRET, SOON)
    news, pushes = handshake.connect(server.address, SECRET, SOON)
    # Both connections are one client's, by its number.
    peer.sendall(channel.encode(Kind.REQUEST, serialization.encode((1, ("number",)))))
    number = serialization.decode(channel.available(peer, Kind.REPLY)[0].content)[2]
    news.sendall(pushes.encode(Kind.REQUEST, serialization.encode((1, ("news", number)))))
    assert serialization.decode(channel.available(peer, Kind.REPLY)[0].content)[1] == "ok"
    good = channel.encode(Kind.REQUEST, serialization.encode((1, ("num_keys",))))
    frames = {
        "repeated": good + good,
        "changed": good[:-1] + bytes([good[-1] ^ 1]),
        "no value": good + channel.encode(Kind.REQUEST, b"\xff\xff"),
        "no request": good + channel.encode(Kind.REQUEST, serialization.encode(("who", 3, 4))),
        "of another kind": good + channel.encode(Kind.NEWS, serialization.encode((1, ("num_keys",)))),
        "too long": b"\xff" * 40,
    }
    with peer, news:
        peer.sendall(frames[how])
        everything(peer)
        everything(news)
    assert works(client)


# -- reaching the server ---------------------------------------------------------------------------
def test_wrong_secret(server: ControlServer) -> None:
    began = time.monotonic()
    with pytest.raises(CommError, match=r"use different secrets\. Set UNISONO_SECRET to the same value on every host"):
        SocketControl(server.address, b"another", 60.0)
    assert time.monotonic() - began < 40.0


def test_port_of_another_protocol() -> None:
    def speak() -> None:
        with other.accept()[0] as peer:
            peer.sendall(b"220 mail here\r\n" * 10)
            everything(peer)

    with socket.create_server(("127.0.0.1", 0)) as other:
        speaker = threading.Thread(target=speak)
        speaker.start()
        with pytest.raises(CommError, match="is not a control plane of unisono; choose another port"):
            SocketControl(other.getsockname(), SECRET, SOON)
        speaker.join(SOON)


def test_connection_refused() -> None:
    with pytest.raises(CommTimeoutError, match=r"no answer from 127.0.0.1:1 after 0.2 s .*Is rank 0 running"):
        SocketControl(("127.0.0.1", 1), SECRET, 0.2)


def test_silent_server() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(CommTimeoutError, match="no answer from"),
    ):
        SocketControl(silent.getsockname(), SECRET, 0.2)


def test_server_may_start_later() -> None:
    with socket.create_server(("127.0.0.1", 0)) as placeholder:
        address = placeholder.getsockname()
    late: list[ControlServer] = []
    refused = threading.Event()
    real = socket.create_connection

    def watched(where: tuple[str, int], timeout: float) -> socket.socket:
        try:
            return real(where, timeout)
        except ConnectionRefusedError:
            refused.set()
            raise

    def start_late() -> None:
        assert refused.wait(SOON)
        late.append(ControlServer(SECRET, *address))

    thread = threading.Thread(target=start_late)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_connection", watched)
        control = SocketControl(address, SECRET, SOON)
    thread.join()
    assert works(control)
    control.close()
    late[0].close()


def test_invalid_listen_addresses(server: ControlServer) -> None:
    with pytest.raises(CommError, match=f"port {server.address[1]} is taken by another program.*MASTER_PORT") as caught:
        ControlServer(SECRET, *server.address)
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(CommError, match=r"192.0.2.1 is not an address of this host"):
        ControlServer(SECRET, "192.0.2.1")


def test_blocked_client_does_not_delay_others(server: ControlServer, client: SocketControl) -> None:
    client.set("big", bytes(8 << 20))
    line, news = connect(server.address, SECRET, SOON)
    for number in range(4):
        line.send(serialization.encode((number + 1, ("get", "big"))), time.monotonic() + SOON)
    assert all(works(client) for _ in range(20))
    received: list[Frame] = []
    while len(received) < 4:
        received += line.receive(SOON, Kind.REPLY)
    assert all(len(serialization.decode(frame.content)[2]) == 8 << 20 for frame in received)
    line.close()
    news.close()


def test_oversized_values(server: ControlServer, client: SocketControl) -> None:
    with pytest.raises(ValueError, match="too many for one message; at most 67108864"):
        client.set("huge", bytes(65 << 20))
    client.join(Group.world(0, 2))
    other = SocketControl(server.address, SECRET, SOON)
    other.join(Group.world(1, 2))
    thread = threading.Thread(target=partial(_refused, other, Group.world(1, 2)))
    thread.start()
    _refused(client, Group.world(0, 2))
    thread.join(SOON)
    assert not thread.is_alive()
    assert works(client)
    other.close()


def _refused(control: SocketControl, group: Group) -> None:
    with pytest.raises(CommError, match="the values of all ranks together have 80 MiB"):
        control.exchange(group, "x", bytes(40 << 20), SOON)


def test_stopped_server_does_not_hang_its_clients(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(
        """
        import time
        from unisono.control.server import ControlServer
        server = ControlServer(b"of the tests")
        print(server.address[1], flush=True)
        time.sleep(60)
        """
    )
    assert process.stdout is not None
    control = SocketControl(("127.0.0.1", int(process.stdout.readline())), SECRET, timeout=0.5)
    control.join(Group.world(0, 1))
    monkeypatch.setattr("unisono.control.client_base._GRACE_S", 0.2)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    with pytest.raises(CommTimeoutError, match=r"has not answered for 0.5 s. Is its process running"):
        control.set("x", b"")
    with pytest.raises(CommTimeoutError, match="has not answered"):
        control.exchange(Group.world(0, 1), "x", 1, 0.1)
    process.send_signal(signal.SIGCONT)
    assert works(control)
    control.close()


def test_lost_reader_wakes_all_waiting_clients(client: SocketControl) -> None:
    """A `get` whose time is up still waits, for another answer than its own."""
    client._reading.acquire()
    failures: list[str] = []

    def give_up() -> None:
        with pytest.raises(CommTimeoutError) as caught:
            client.get("never", 0.01)
        failures.append(str(caught.value))

    thread = threading.Thread(target=give_up)
    thread.start()
    while len(client._waiters) < 2:
        assert thread.is_alive()
    client._reading.release()
    client._wake_others()
    thread.join(SOON)
    assert failures == ["timed out: waited 0.0 s for the key 'never', which no rank has set"]
