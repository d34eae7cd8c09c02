"""Hosts meet although strangers knock, who say nothing, half of it, or the wrong word."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from patience import until

from unisono import wire
from unisono.control import LocalHub
from unisono.errors import CommError
from unisono.group import Group
from unisono.lanes import Lanes, meet
from unisono.lanes import strangers as module
from unisono.lanes.strangers import TOKEN_BYTES, Strangers, introduction

SOON_S = 20.0
TOKEN = bytes(range(TOKEN_BYTES))


@contextlib.contextmanager
def listening() -> Iterator[tuple[socket.socket, Any]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener, listener.getsockname()[:2]


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
        return line.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_silent_strangers_hold_up_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    # So that nobody is let in only because a stranger's time was up.
    monkeypatch.setattr(module, "_WITHIN_S", 1000.0)
    hub, ends = LocalHub(), dict[int, Any]()

    def be(rank: int) -> None:
        group, control = Group.world(rank, 3), hub.control()
        try:
            ends[rank] = meet(group, control, [[0], [1], [2]], "127.0.0.1", SOON_S)
        except CommError as error:
            ends[rank] = error

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(3)]
    threads[0].start()
    watcher = hub.control()
    host, port, token = wire.decode(watcher.get(f"{Group.world(0, 3).name}/way to host 0", SOON_S))
    with knocking((host, port), b"", token[:-1], bytes(TOKEN_BYTES + 4), introduction(token, 7), b""):
        for thread in threads[1:]:
            thread.start()
        for thread in threads:
            thread.join(2 * SOON_S)
    assert [type(ends.get(rank)) for rank in range(3)] == [Lanes] * 3
    assert [sorted(ends[rank]._peers) for rank in range(3)] == [[1, 2], [0, 2], [0, 1]]
    for lanes in ends.values():
        lanes.close()


@pytest.mark.parametrize("said", [b"", TOKEN, introduction(TOKEN, 1)[:-1]])
def test_who_does_not_say_all_in_time_is_hung_up_on(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(module, "_WITHIN_S", 0.05)
    with listening() as (listener, address), knocking(address, said) as (line,), Strangers(listener, TOKEN) as door:
        assert until(lambda: door.introduced(0.02) == [] and hung_up(line))
        with knocking(address, introduction(TOKEN, 3)):
            ((number, peer, _),) = door.introduced(SOON_S)
            peer.close()
    assert number == 3


def test_a_crowd_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 4)
    with (
        listening() as (listener, address),
        knocking(address, *[b""] * 10) as lines,
        Strangers(listener, TOKEN) as door,
    ):
        assert until(lambda: door.introduced(0.02) == [] and list(map(hung_up, lines)) == [True] * 6 + [False] * 4)
        with knocking(address, introduction(TOKEN, 5) + b"what comes after"):
            ((number, peer, _),) = door.introduced(SOON_S)
            peer.setblocking(True)
            said = peer.recv(100)
            peer.close()
    assert (number, said) == (5, b"what comes after")


def test_the_wrong_word_is_hung_up_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WITHIN_S", 1000.0)
    wrong = introduction(TOKEN[::-1], 1)
    with listening() as (listener, address), knocking(address, wrong) as (line,), Strangers(listener, TOKEN) as door:
        assert until(lambda: door.introduced(0.02) == [] and hung_up(line))
