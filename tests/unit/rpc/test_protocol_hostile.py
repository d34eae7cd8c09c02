"""Strangers at the door, and ranks that send what no agent sends: refused, and nothing runs."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from waiting import wait_until

import unisono as un
from unisono import serialization
from unisono.control.local import LocalHub
from unisono.control.mesh import Link
from unisono.control.sockets import Hello
from unisono.core.frames import HEAD_BYTES, FrameChannel, Kind
from unisono.core.group import Group
from unisono.core.mail import pack
from unisono.core.transport import Envelope
from unisono.errors import CommError, PeerLostError
from unisono.rpc import protocol
from unisono.rpc.protocol import HEADER, NO_CONTEXT
from unisono.testing import pool, run_ranks
from unisono.transports.tcp.mailbox import TcpMailbox, meet

rpc = un.rpc
RAN: list[Any] = []
LIMIT_S = 20.0


@rpc.expose
def note(value: Any) -> None:
    RAN.append(value)


@rpc.expose
def add(x: int, y: int = 1) -> int:
    return x + y


def wait_for(control: Any, key: str) -> Any:
    return serialization.decode(control.get(key, LIMIT_S))


def assail(address: tuple[str, int], kind: str) -> bytes:
    """Knock at a port without the secret; what is heard before the other side hangs up."""
    with socket.create_connection(address, LIMIT_S) as line:
        line.settimeout(LIMIT_S)
        heard = b""
        try:
            if kind == "garbage":
                line.sendall(os.urandom(4096))
            elif kind == "http":
                line.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + b"x" * 40)
            elif kind == "wrong secret":
                greeting = Hello(b"a guess", client=True)
                line.sendall(greeting.hello)
                heard += line.recv(4096)
                line.sendall(greeting.proof() + FrameChannel(b"k", b"k").encode(Kind.MAIL, struct.pack("<I", 1)))
            elif kind == "replay":
                line.sendall(b"unisono3" + bytes(32) + bytes(32) + bytes(24))
            while more := line.recv(4096):
                heard += more
        except (ConnectionError, TimeoutError):
            pass
    return heard


@pytest.mark.parametrize("kind", ["garbage", "http", "wrong secret", "replay"])
def test_unauthenticated_connections_are_rejected_during_rendezvous(kind: str) -> None:
    hub, found = LocalHub(), dict[int, dict[int, Link]]()
    controls = [hub.control() for _ in range(2)]
    groups = [Group.world(rank, 2) for rank in range(2)]

    def come(rank: int) -> None:
        controls[rank].join(groups[rank], lambda cause: None)
        found[rank] = meet(groups[rank], controls[rank], "127.0.0.1", LIMIT_S)

    first = threading.Thread(target=come, args=(0,))
    first.start()
    address = wait_for(controls[1], "world/mail at 0")
    for _ in range(3):
        assert b"rank" not in assail(address, kind)
    second = threading.Thread(target=come, args=(1,))
    second.start()
    for thread in (first, second):
        thread.join(LIMIT_S)
    # The two have found each other, and the port is closed now.
    found[1][0][0].setblocking(True)
    found[0][1][0].sendall(b"hello")
    assert found[1][0][0].recv(5) == b"hello"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, LIMIT_S)
    for links in found.values():
        for line, _ in links.values():
            line.close()


def boxes() -> tuple[TcpMailbox, TcpMailbox]:
    hub, made = LocalHub(), dict[int, TcpMailbox]()

    def make(rank: int) -> None:
        group, control = Group.world(rank, 2), hub.control()
        control.join(group, lambda cause: None)
        made[rank] = TcpMailbox(group, control, "127.0.0.1", LIMIT_S)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return made[0], made[1]


def damaged(head: bytes, at: int) -> bytes:
    changed = bytearray(head)
    changed[at] ^= 1
    return bytes(changed)


@pytest.mark.parametrize("what", ["damaged", "of another kind", "too short", "too long", "repeated", "garbage", "huge"])
def test_forged_bytes_in_a_connection(what: str) -> None:
    """An attacker on the connection cannot forge, change or repeat a message."""
    here, there = boxes()
    here.send(1, b"first", (), LIMIT_S)
    line, channel = here._links[1]
    content = pack(b"second", ())
    made = {
        "damaged": lambda: damaged(channel.encode(Kind.MAIL, content), -1),
        "of another kind": lambda: channel.encode(Kind.REQUEST, content),
        "too short": lambda: channel.encode(Kind.MAIL, content[:-1]),
        "too long": lambda: channel.encode(Kind.MAIL, content + b"x"),
        "repeated": lambda: channel.encode(Kind.MAIL, content) * 2,
        "garbage": lambda: os.urandom(60),
        "huge": lambda: b"\xff" * HEAD_BYTES,
    }
    line.send(made[what]())
    heads = []
    deadline = time.monotonic() + LIMIT_S
    while 0 not in there.lost and time.monotonic() < deadline:
        there.wait(0.1)
        heads += [mail.head for mail in there.poll()]
    assert heads == ([b"first", b"second"] if what == "repeated" else [b"first"])
    assert "has failed" in str(there.lost[0])
    with pytest.raises(PeerLostError):
        there.send(0, b"answer", (), 1.0)
    here.close()
    there.close()


def test_invalid_bytes_in_shared_memory_mark_the_writer_lost() -> None:
    def program(comm: un.Communicator) -> Any:
        box, _ = comm.mailbox()
        found = ""
        if comm.rank == 0:
            out = box._out[1]  # type: ignore[attr-defined]  # not in the annotations of what it is
            out.write(struct.pack("<II", 8, 2**31) + bytes(8))
            box.wake()
        comm.barrier()
        if comm.rank == 1:
            assert box.poll() == []
            found = str(box.lost[0])
        comm.barrier()
        box.close()
        return found

    assert "an invalid message" in pool("shm").run(program, size=2)[1]


@given(
    st.one_of(
        st.binary(max_size=80),
        st.builds(
            lambda kind, number, rest: HEADER.pack(kind, number, NO_CONTEXT, 0) + rest,
            st.integers(0, 20),
            st.integers(0, 3),
            st.one_of(
                st.binary(max_size=40),
                st.just(serialization.encode((1, "a", None))),
                st.just(serialization.encode((-5, 2**70))),
            ),
        ),
    ),
)
def test_arbitrary_bytes_run_no_code(content: bytes) -> None:
    """Even one of the job's own processes can do no more than call what is exposed, or be taken for lost."""
    dispatcher = _agent().dispatcher
    dispatcher.ended.clear()
    _agent().box.lost.clear()
    found = dispatcher.dispatch(Envelope(0, content, ()))
    if found is not None and content[0] in (protocol.REQUEST, protocol.REMOTE):
        found[0]()
    assert not RAN


_made: list[Any] = []


def _agent() -> Any:
    """One for all examples, which is never closed in order."""
    if not _made:
        comm = un.init()
        _made.append(rpc.init(comm))
        comm.close()
    return _made[0]


def test_rank_that_sends_invalid_bytes_is_lost_to_the_receiver_only() -> None:
    def program(comm: un.Communicator) -> Any:
        agent = rpc.init(comm)
        comm.barrier()
        if comm.rank == 1:
            agent.box.send(0, b"nonsense", (), LIMIT_S)
        comm.barrier()
        result = None
        if comm.rank == 0:
            assert wait_until(lambda: 1 in agent.box.lost)
            with pytest.raises(PeerLostError, match="an invalid message"):
                agent.rpc_sync(1, add, (1,))
            result = agent.rpc_sync(2, add, (1,))
        comm.barrier()
        agent.shutdown(graceful=False)
        return result

    assert run_ranks(program, 3) == [2, None, None]


@pytest.mark.parametrize("kind", [protocol.REQUEST, protocol.REMOTE])
def test_aborted_call_does_not_block_shutdown(kind: int) -> None:
    def program(comm: un.Communicator) -> None:
        agent = rpc.init(comm)
        comm.barrier()
        if comm.rank == 2:
            agent.box.send(0, HEADER.pack(kind, 7, NO_CONTEXT, 0), (), LIMIT_S)
        if comm.rank == 0:
            assert wait_until(lambda: 2 in agent.box.lost)
        comm.barrier()
        agent.shutdown(graceful=comm.rank != 2, timeout=5.0)

    run_ranks(program, 3)


def test_request_cannot_reach_unexposed_objects() -> None:
    def program(comm: un.Communicator) -> Any:
        rpc.init(comm)
        texts = []
        if comm.rank == 0:
            client = rpc.context.current_agent().client
            for target in ("os:system", "builtins:eval", f"{__name__}:RAN.append", "@call", "@fetch", "", ":"):
                with pytest.raises((rpc.NotExposedError, rpc.RemoteError)) as caught:
                    client.call(1, target, None, (torch.ones(1),), {}, LIMIT_S)
                texts.append(str(caught.value))
            with pytest.raises(PeerLostError, match="freed"):
                client.call(1, "@fetch", (0, 99), (), {}, LIMIT_S)
        rpc.shutdown()
        return texts

    texts = run_ranks(program, 2)[0]
    assert all("not exposed" in text or "trusts" in text for text in texts)
    assert not RAN


def test_deserialization_outside_calls_is_restricted() -> None:
    for value in (note, torch.add, int):
        with pytest.raises(TypeError, match="send plain values"):
            serialization.encode(value)
    with un.init() as comm:
        rpc.init(comm)
        with pytest.raises(TypeError, match="RRef"):
            serialization.encode([rpc.RRef(1)])
        rpc.shutdown()
    for kind in b"argqk":
        with pytest.raises(ValueError, match="hold no value"):
            serialization.decode(bytes([kind]) + serialization.encode("torch:add") + serialization.encode(3))
    tensor = torch.arange(5_000)
    assert torch.equal(serialization.decode(serialization.encode(tensor)), tensor)
    with pytest.raises(CommError, match=r"rpc\.init"):
        rpc.get_worker_info()
