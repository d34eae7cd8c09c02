"""The control plane among strangers, liars, the slow, the dead and the forked."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from unisono import wire
from unisono.control import Cause
from unisono.control import server as server_module
from unisono.control.channel import HELLO_BYTES, Greeting
from unisono.control.client import SocketControl
from unisono.control.line import connect
from unisono.control.server import Server
from unisono.errors import ClosedError, CommError, CommTimeoutError, PeerLostError
from unisono.group import Group

SECRET = b"of the tests"
SOON = 10.0

Start = Callable[..., "subprocess.Popen[str]"]

RANK = """
    import os, sys
    from unisono.control.client import SocketControl
    from unisono.group import Group

    port, rank, size = map(int, sys.argv[1:])
    control = SocketControl(("127.0.0.1", port), b"of the tests", 10.0)
    group = Group.world(rank, size)
    control.join(group, lambda cause: None)
"""


@pytest.fixture
def server() -> Iterator[Server]:
    serving = Server(SECRET)
    yield serving
    serving.close()
    assert not serving._thread.is_alive()


@pytest.fixture
def client(server: Server) -> Iterator[SocketControl]:
    control = SocketControl(server.address, SECRET, SOON)
    yield control
    control.close()
    assert not control._reader.is_alive()


def works(control: SocketControl) -> bool:
    control.set("works", b"yes")
    return control.get("works", SOON) == b"yes"


def everything(peer: socket.socket) -> bytes:
    """What the other side still sends before it closes the connection."""
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
def test_garbage_is_answered_by_silence(server: Server, client: SocketControl, garbage: bytes) -> None:
    with socket.create_connection(server.address) as stranger:
        stranger.sendall(garbage)
        assert everything(stranger) == b""
    assert works(client)


def test_a_wrong_proof_ends_the_connection(server: Server, client: SocketControl) -> None:
    greeting = Greeting(b"a guess", client=True)
    with socket.create_connection(server.address) as stranger:
        stranger.sendall(greeting.hello)
        greeting.meet(stranger.recv(HELLO_BYTES))
        stranger.sendall(greeting.proof())
        # Only the server's own proof comes.
        assert len(everything(stranger)) == 32
    assert works(client)


def test_who_says_nothing_is_turned_away(
    monkeypatch: pytest.MonkeyPatch, server: Server, client: SocketControl
) -> None:
    monkeypatch.setattr(server_module, "_HELLO_WITHIN_S", 0.1)
    with socket.create_connection(server.address) as stranger:
        assert everything(stranger) == b""
    assert works(client)


def test_too_many_strangers_make_room_for_each_other(
    monkeypatch: pytest.MonkeyPatch, server: Server, client: SocketControl
) -> None:
    monkeypatch.setattr(server_module, "_MAX_STRANGERS", 3)
    strangers = [socket.create_connection(server.address) for _ in range(5)]
    assert [everything(stranger) for stranger in strangers[:2]] == [b"", b""]
    assert works(client)
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("how", ["repeated", "changed", "no value", "no request", "too long"])
def test_a_bad_frame_ends_its_connection_only(server: Server, client: SocketControl, how: str) -> None:
    line, news = connect(server.address, SECRET, SOON)
    good = line._channel.seal(wire.encode((1, ("num_keys",))))
    frames = {
        "repeated": good + good,
        "changed": good[:-1] + bytes([good[-1] ^ 1]),
        "no value": good + line._channel.seal(b"\xff\xff"),
        "no request": good + line._channel.seal(wire.encode(("who", 3, 4))),
        "too long": b"\xff" * 40,
    }
    line._peer.sendall(frames[how])
    everything(line._peer)
    everything(news._peer)
    assert works(client)
    line.close()
    news.close()


# -- reaching the server ---------------------------------------------------------------------------
def test_wrong_secret(server: Server) -> None:
    began = time.monotonic()
    with pytest.raises(CommError, match="the secrets differ: set UNISONO_SECRET to the same value on every host"):
        SocketControl(server.address, b"another", SOON)
    assert time.monotonic() - began < 5.0


def test_something_else_listens() -> None:
    def speak() -> None:
        with other.accept()[0] as peer:
            peer.sendall(b"220 mail here\r\n" * 10)
            everything(peer)

    with socket.create_server(("127.0.0.1", 0)) as other:
        speaker = threading.Thread(target=speak)
        speaker.start()
        with pytest.raises(CommError, match="is no control plane of unisono; choose another port"):
            SocketControl(other.getsockname(), SECRET, SOON)
        speaker.join(SOON)


def test_nobody_listens() -> None:
    with pytest.raises(CommTimeoutError, match=r"nobody answers at 127.0.0.1:1 after 0.2 s .*Is rank 0 running"):
        SocketControl(("127.0.0.1", 1), SECRET, 0.2)


def test_somebody_listens_and_says_nothing() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(CommTimeoutError, match="nobody answers"),
    ):
        SocketControl(silent.getsockname(), SECRET, 0.2)


def test_the_server_may_start_later() -> None:
    with socket.create_server(("127.0.0.1", 0)) as placeholder:
        address = placeholder.getsockname()
    late: list[Server] = []
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
        late.append(Server(SECRET, *address))

    thread = threading.Thread(target=start_late)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_connection", watched)
        control = SocketControl(address, SECRET, SOON)
    thread.join()
    assert works(control)
    control.close()
    late[0].close()


def test_addresses_that_cannot_be_listened_at(server: Server) -> None:
    with pytest.raises(CommError, match=f"port {server.address[1]} is taken by another program.*MASTER_PORT") as caught:
        Server(SECRET, *server.address)
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(CommError, match=r"192.0.2.1 is no address of this host"):
        Server(SECRET, "192.0.2.1")


# -- ends ------------------------------------------------------------------------------------------
def test_goodbye_is_no_death(client: SocketControl, server: Server) -> None:
    told: list[Cause] = []
    client._on_orphan = lambda: told.append(Cause("orphan", None, ""))
    client.join(Group.world(0, 2), told.append)
    closer = threading.Timer(0.0, server.close)
    closer.start()
    with pytest.raises(ClosedError, match=r"the control plane at 127.0.0.1:\d+ has ended"):
        client.exchange(Group.world(0, 2), "x", 1, SOON)
    closer.join()
    client._reader.join(SOON)
    assert told == []


def test_close_with_patience_waits_for_clients(server: Server) -> None:
    control = SocketControl(server.address, SECRET, SOON)
    server.retire(SOON)
    assert works(control)
    assert server.stay()
    server.retire(SOON)
    control.close()
    server._thread.join(SOON)
    assert not server.stay()


def test_the_death_of_the_server(start: Start) -> None:
    process = start(
        """
        import time
        from unisono.control.server import Server
        server = Server(b"of the tests")
        print(server.address[1], flush=True)
        time.sleep(60)
        """
    )
    assert process.stdout is not None
    address = ("127.0.0.1", int(process.stdout.readline()))
    orphaned = threading.Event()
    control = SocketControl(address, SECRET, SOON, on_orphan=orphaned.set)
    group, told = Group.world(0, 2), []
    control.join(group, told.append)
    killer = threading.Timer(0.05, process.kill)
    killer.start()
    with pytest.raises(PeerLostError, match=f"rank 0 of 2: the control plane at 127.0.0.1:{address[1]} was lost"):
        control.exchange(group, "x", 1, SOON)
    assert orphaned.wait(SOON)
    assert [cause.kind for cause in told] == ["PeerLostError"]
    cause = control.cause(group)
    assert cause == told[0]
    assert control.fail(group, Cause("AbortedError", 0, "too late")) == cause
    with pytest.raises(PeerLostError):
        control.set("x", b"")
    control.close()


def test_a_killed_process_is_named_within_a_second(server: Server, client: SocketControl, start: Start) -> None:
    victim = start(
        RANK
        + """
    print("joined", flush=True)
    control.exchange(group, "never ends", 1, 60.0)
    """,
        server.address[1],
        1,
        3,
    )
    group = Group.world(0, 3)
    client.join(group, lambda cause: None)
    third = SocketControl(server.address, SECRET, SOON)
    third.join(Group.world(2, 3), lambda cause: None)
    assert victim.stdout is not None
    assert victim.stdout.readline() == "joined\n"
    killed_at = []

    def kill() -> None:
        killed_at.append(time.monotonic())
        victim.send_signal(signal.SIGKILL)

    killer = threading.Timer(0.05, kill)
    killer.start()
    with pytest.raises(PeerLostError, match="rank 1 was lost: its process ended") as caught:
        client.exchange(group, "never ends", 1, SOON)
    assert time.monotonic() - killed_at[0] < 1.0
    assert caught.value.peer == 1
    # A second death changes nothing: the first cause stays.
    third._line.hang_up()
    with pytest.raises(PeerLostError, match="rank 1 was lost"):
        client.exchange(group, "another", 1, SOON)
    third.close()


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("raise ValueError('no data')", "rank 1 failed: ValueError: no data"),
        ("", "rank 1 has left"),
        ("sys.exit(3)", "rank 1 has left"),
        ("os._exit(0)", "rank 1 was lost"),
    ],
)
def test_how_a_process_ends(server: Server, client: SocketControl, start: Start, ending: str, words: str) -> None:
    client.join(Group.world(0, 2), lambda cause: None)
    process = start(f"{RANK}\n    {ending}", server.address[1], 1, 2)
    process.wait(SOON)
    with pytest.raises(PeerLostError, match=words):
        client.exchange(Group.world(0, 2), "x", 1, SOON)


# -- loads -----------------------------------------------------------------------------------------
def test_who_does_not_read_holds_nobody_up(server: Server, client: SocketControl) -> None:
    client.set("big", bytes(8 << 20))
    line, news = connect(server.address, SECRET, SOON)
    for number in range(4):
        line.send(wire.encode((number + 1, ("get", "big"))), time.monotonic() + SOON)
    assert all(works(client) for _ in range(20))
    received: list[bytes] = []
    while len(received) < 4:
        received += line.receive(SOON)
    assert all(len(wire.decode(content)[2]) == 8 << 20 for content in received)
    line.close()
    news.close()


def test_what_is_too_big(server: Server, client: SocketControl) -> None:
    with pytest.raises(ValueError, match="more than the 67108864 that one message may have"):
        client.set("huge", bytes(65 << 20))
    client.join(Group.world(0, 2), lambda cause: None)
    other = SocketControl(server.address, SECRET, SOON)
    other.join(Group.world(1, 2), lambda cause: None)
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


def test_a_stopped_server_does_not_hang_its_clients(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(
        """
        import time
        from unisono.control.server import Server
        server = Server(b"of the tests")
        print(server.address[1], flush=True)
        time.sleep(60)
        """
    )
    assert process.stdout is not None
    control = SocketControl(("127.0.0.1", int(process.stdout.readline())), SECRET, timeout=0.5)
    control.join(Group.world(0, 1), lambda cause: None)
    monkeypatch.setattr("unisono.control.requester._GRACE_S", 0.2)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    with pytest.raises(CommTimeoutError, match=r"has not answered for 0.5 s. Is its process alive, and not stopped"):
        control.set("x", b"")
    with pytest.raises(CommTimeoutError, match="has not answered"):
        control.exchange(Group.world(0, 1), "x", 1, 0.1)
    process.send_signal(signal.SIGCONT)
    assert works(control)
    control.close()


# -- forks -----------------------------------------------------------------------------------------
def test_a_fork_refuses_and_holds_nothing_open(server: Server, client: SocketControl, start: Start) -> None:
    client.join(Group.world(0, 2), lambda cause: None)
    process = start(
        RANK
        + """
    import signal
    ready, done = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            control.set("x", b"")
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        control.close()
        os.close(done)
        os.read(ready, 1)
        os._exit(0)
    os.waitpid(child, 0)
    """,
        server.address[1],
        1,
        2,
    )
    assert process.stdout is not None
    assert "CommError this communicator belongs to process" in process.stdout.readline()
    # The child lives on, and yet the death of its parent is seen.
    process.kill()
    with pytest.raises(PeerLostError, match="rank 1 was lost"):
        client.exchange(Group.world(0, 2), "x", 1, SOON)


def test_store_drives_gloo(server: Server, start: Start) -> None:
    code = """
        import sys
        from datetime import timedelta
        import torch
        import torch.distributed as dist
        from unisono.control.client import SocketControl
        from unisono.control.store import ControlStore

        rank = int(sys.argv[2])
        control = SocketControl(("127.0.0.1", int(sys.argv[1])), b"of the tests", 30.0)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=20)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = dist.ProcessGroupGloo(ControlStore(control, "gloo", 20.0), rank, 2, options)
        tensor = torch.arange(4.0) * (rank + 1)
        group.allreduce([tensor]).wait()
        print(tensor.tolist())
        control.close()
        """
    ranks = [start(code, server.address[1], rank) for rank in range(2)]
    assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["[0.0, 3.0, 6.0, 9.0]\n"] * 2
