"""Connections between ranks are encrypted by one setting, and end in an error where ranks do not trust each other."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import run_concurrently

import unisono as un
from unisono.bootstrap import find
from unisono.bootstrap.rendezvous import acquire
from unisono.control.encryption import tls_context
from unisono.control.handshake import Acceptor, connect
from unisono.control.server import ControlServer
from unisono.control.sockets import find_secret
from unisono.errors import CommError, CommTimeoutError, PeerLostError

SECRET = b"of the job"
WITHIN_S = 20.0


def certificate(folder: Path, name: str) -> str:
    """Return a file with a new key, and a certificate of its own."""
    key, own = folder / f"{name}.key", folder / f"{name}.crt"
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    subprocess.run(["openssl", "req", "-x509", *kind, "-keyout", key, "-out", own], check=True, capture_output=True)
    both = folder / f"{name}.pem"
    both.touch(0o600)
    both.write_text(key.read_text() + own.read_text())
    return str(both)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> str:
    return certificate(tmp_path_factory.mktemp("certificates"), "job")


class Eavesdropper:
    """A line between a client and a server, which keeps all that passes."""

    def __init__(self, server: tuple[str, int]) -> None:
        self.heard = bytearray()
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        with client, socket.create_connection(self._server) as server, selectors.DefaultSelector() as selector:
            selector.register(client, selectors.EVENT_READ, server)
            selector.register(server, selectors.EVENT_READ, client)
            while selector.get_map():
                for key, _ in selector.select():
                    end = key.fileobj
                    assert isinstance(end, socket.socket)
                    data = end.recv(1 << 16)
                    self.heard += data
                    if data:
                        key.data.sendall(data)
                    else:
                        selector.unregister(end)
                        key.data.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._thread.join()
        self._listener.close()


class Server:
    """Accepts connections, and keeps those that are authenticated."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self.listener.getsockname()
        self.accepted: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(self.listener, SECRET, self._selector)
        self._ended = threading.Event()
        self._arrived = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            for key, _ in self._selector.select(0.02):
                if key.fileobj is self.listener:
                    self._acceptor.accept()
                elif self._acceptor.advance(key.data) is not None:
                    self.accepted.append(key.data.peer)
                    self._arrived.set()
            self._acceptor.tidy()

    def first(self) -> socket.socket:
        assert self._arrived.wait(WITHIN_S)
        return self.accepted[0]

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._acceptor.close()
        self._selector.close()
        for peer in (*self.accepted, self.listener):
            peer.close()


@pytest.fixture
def server() -> Iterator[Server]:
    with closing(Server()) as made:
        yield made


@pytest.fixture
def tls(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_TLS", job)


def echo(peer: socket.socket) -> None:
    """Send back what arrives, with the end."""
    peer.setblocking(True)
    while data := peer.recv(1 << 16):
        peer.sendall(data)
    peer.shutdown(socket.SHUT_WR)


@pytest.mark.usefixtures("tls")
def test_what_ranks_send_cannot_be_read_on_the_line(server: Server) -> None:
    said = b"a gradient " * 100_000
    line = Eavesdropper(server.address)
    peer, _ = connect(line.address, SECRET, WITHIN_S, 1)
    with peer:
        assert peer.getpeername() == line.address
        answer = threading.Thread(target=echo, args=(server.first(),))
        answer.start()
        sending = threading.Thread(target=lambda: (peer.sendall(said), peer.shutdown(socket.SHUT_WR)))
        sending.start()
        arrived = bytearray()
        while data := peer.recv(1 << 16):
            arrived += data
        sending.join()
        answer.join()
    server.first().close()
    line.close()
    assert arrived == said
    assert len(line.heard) > 2 * len(said)
    assert b"gradient" not in line.heard
    assert b"unisono" not in line.heard


def test_without_the_setting_it_can_be_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNISONO_TLS", raising=False)
    line = Eavesdropper(server.address)
    peer, _ = connect(line.address, SECRET, WITHIN_S, 1)
    peer.close()
    server.first().close()
    line.close()
    assert b"unisono" in line.heard


def test_a_stranger_is_refused(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UNISONO_TLS", job)
    with closing(Server()) as server:
        monkeypatch.setenv("UNISONO_TLS", certificate(tmp_path, "other"))
        with pytest.raises(OSError, match=r"TLS: CERTIFICATE_VERIFY_FAILED\. Do all ranks have UNISONO_TLS"):
            connect(server.address, SECRET, WITHIN_S, 1)
        # It trusts the server, which does not trust it.
        both = tmp_path / "both.pem"
        both.touch(0o600)
        both.write_text((tmp_path / "other.pem").read_text() + Path(job).read_text())
        monkeypatch.setenv("UNISONO_TLS", str(both))
        with pytest.raises(OSError, match=r"TLS: .* Do all ranks have UNISONO_TLS"):
            connect(server.address, SECRET, WITHIN_S, 1)
        assert not server.accepted
    assert "TLS with ('127.0.0.1', " in caplog.text


def test_a_rank_without_the_setting_is_refused(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_TLS", job)
    with closing(Server()) as server:
        monkeypatch.delenv("UNISONO_TLS")
        with pytest.raises(OSError, match=r"TLS: the other side encrypts, and this one does not\. Do all ranks have"):
            connect(server.address, SECRET, WITHIN_S, 1)
        assert not server.accepted
    with closing(Server()) as server:
        monkeypatch.setenv("UNISONO_TLS", job)
        with pytest.raises(OSError, match=r"TLS: the other side does not encrypt\. Do all ranks have UNISONO_TLS"):
            connect(server.address, SECRET, WITHIN_S, 1)
        assert not server.accepted


@pytest.mark.parametrize("case", ["server only", "client only", "other certificates", "client not trusted"])
def test_ranks_with_other_settings_are_told_at_once(
    job: str, tmp_path: Path, port: int, case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = certificate(tmp_path, "other")
    if case == "client not trusted":
        with Path(other).open("a") as file:
            file.write(Path(job).read_text())
    here, there = {"server only": (job, ""), "client only": ("", job)}.get(case, (job, other))
    url = f"tcp://127.0.0.1:{port}"
    monkeypatch.setenv("UNISONO_TLS", here)
    listening = threading.Event()
    real = ControlServer.__init__

    def watched(self: ControlServer, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        monkeypatch.setenv("UNISONO_TLS", there)
        listening.set()

    def second() -> Any:
        assert listening.wait(WITHIN_S)
        return find(url, 1, 2, 60.0)

    with monkeypatch.context() as patch:
        patch.setattr(ControlServer, "__init__", watched)
        # Of the server, which reaches itself, the own connection comes with the other setting, too.
        control, refused = run_concurrently(lambda: acquire(url, find_secret(), "127.0.0.1", port), second)
    assert isinstance(refused, CommError)
    assert f"no connection to 127.0.0.1:{port}: TLS: " in str(refused)
    assert "Do all ranks have UNISONO_TLS" in str(refused)
    monkeypatch.setenv("UNISONO_TLS", here)
    try:
        with pytest.raises(CommTimeoutError) as waited:
            find(url, 0, 2, 0.3)
    finally:
        control.release()
    assert "a process at 127.0.0.1 was refused: TLS: " in str(waited.value)
    assert str(waited.value).count("UNISONO_TLS") == 1
    assert sum("TLS with" in record.message for record in caplog.records) <= 2


@pytest.mark.usefixtures("tls")
def test_a_silent_server_is_waited_for_no_longer_than_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(OSError, match="TLS: no answer"):
        connect(silent.getsockname(), SECRET, 0.2, 1)


@pytest.mark.soak
@pytest.mark.usefixtures("tls")
def test_a_silent_client_is_dropped(server: Server) -> None:
    with socket.create_connection(server.address) as silent:
        silent.settimeout(WITHIN_S)
        # A wrong end of the connection would be an error, or a timeout.
        assert silent.recv(1) == b""
    assert not server.accepted


@pytest.mark.usefixtures("tls")
def test_a_closed_end_closes_the_connection(server: Server) -> None:
    peer, _ = connect(server.address, SECRET, WITHIN_S, 1)
    accepted = server.first()
    accepted.setblocking(True)
    accepted.settimeout(WITHIN_S)
    peer.sendall(b"the last words")
    peer.close()
    arrived = b""
    while data := accepted.recv(1 << 10):
        arrived += data
    assert arrived == b"the last words"
    with pytest.raises(OSError, match=r"[Bb]roken pipe|reset"):
        accepted.sendall(bytes(100 << 20))


def program(comm: un.Communicator) -> tuple[float, list[int], float]:
    total = torch.full((300_000,), float(comm.rank))
    comm.all_reduce(total)
    received = torch.empty(70_000)
    comm.sendrecv(
        torch.full((70_000,), float(comm.rank)), (comm.rank + 1) % comm.size, received, (comm.rank - 1) % comm.size
    )
    return total[-1].item(), comm.all_gather_object(comm.rank), received[-1].item()


@pytest.mark.usefixtures("tls")
@pytest.mark.parametrize(("backend", "hosts"), [("tcp", None), ("shm+tcp", [[0, 1], [2]])])
def test_ranks_that_encrypt(backend: str, hosts: Any) -> None:
    found = un.launch(program, 3, backend, hosts=hosts, timeout=WITHIN_S)
    assert found == [(3.0, [0, 1, 2], float((rank - 1) % 3)) for rank in range(3)]


def dies(comm: un.Communicator) -> None:
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(torch.ones(1 << 20))


@pytest.mark.usefixtures("tls")
def test_a_killed_rank_is_named() -> None:
    ends = un.launch(dies, 3, "tcp", on_failure="continue", timeout=WITHIN_S)
    for end in ends[0], ends[2]:
        assert isinstance(end, PeerLostError)
        assert end.peer == 1


def test_a_file_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path / "missing.pem", tmp_path / "empty.pem"):
        (tmp_path / "empty.pem").touch()
        monkeypatch.setenv("UNISONO_TLS", str(path))
        with pytest.raises(CommError, match=r"UNISONO_TLS is '.*', which is no file with a key and its certificate"):
            un.launch(program, 2, "tcp", timeout=WITHIN_S)


def test_a_key_that_others_can_read_is_refused(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "copied.pem"
    path.write_text(Path(job).read_text())
    monkeypatch.setenv("UNISONO_TLS", str(path))
    for mode in (0o604, 0o640, 0o660):
        path.chmod(mode)
        with pytest.raises(CommError, match=f"whose key is open to other users .mode {mode:04o}.: run `chmod go-rwx"):
            tls_context(server=True)
    path.chmod(0o400)
    assert tls_context(server=True) is not None


def test_a_key_with_a_pass_phrase_is_refused(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = subprocess.run(
        ["openssl", "pkey", "-in", job, "-aes256", "-passout", "pass:word"], check=True, capture_output=True, text=True
    )
    path = tmp_path / "locked.pem"
    path.touch(0o600)
    path.write_text(key.stdout + Path(job).read_text().partition("-----END PRIVATE KEY-----\n")[2])
    monkeypatch.setenv("UNISONO_TLS", str(path))
    with pytest.raises(CommError, match=r"UNISONO_TLS is '.*', whose key has a pass phrase, which ranks cannot type"):
        tls_context(server=True)


@pytest.mark.usefixtures("tls")
@pytest.mark.parametrize("backend", ["gloo", "shm+gloo"])
def test_backends_that_cannot_encrypt_are_refused(backend: str) -> None:
    with pytest.raises(ValueError, match="backend 'gloo' does not encrypt, and UNISONO_TLS is set: pass"):
        un.launch(program, 2, backend, hosts=[[0], [1]] if "+" in backend else None, timeout=WITHIN_S)
