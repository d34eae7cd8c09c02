"""UNISONO_PORT_RANGE: ranks listen at these ports only."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

import unisono as un
from unisono.control.sockets import PORT_RANGE, listen
from unisono.errors import CommError


def neighbours(count: int) -> list[socket.socket]:
    """Return listeners at ports that follow each other."""
    for _ in range(100):
        with ExitStack() as undo:
            first = undo.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = first.getsockname()[1]
            try:
                rest = [undo.enter_context(socket.create_server(("127.0.0.1", port + n))) for n in range(1, count)]
            except OSError:
                continue
            undo.pop_all()
            return [first, *rest]
    raise AssertionError("no ports that follow each other are free")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """The listeners at all ports of the range."""
    listeners = neighbours(6)
    first, last = listeners[0].getsockname()[1], listeners[-1].getsockname()[1]
    monkeypatch.setenv(PORT_RANGE, f"{first}-{last}")
    yield listeners
    for listener in listeners:
        listener.close()


def test_the_free_port_of_the_range_is_found(taken: list[socket.socket]) -> None:
    with pytest.raises(CommError, match=r"all ports of UNISONO_PORT_RANGE=.* are taken"):
        listen("127.0.0.1", 0)
    with taken.pop(3) as freed:
        port = freed.getsockname()[1]
    with listen("127.0.0.1", 0) as found:
        assert found.getsockname()[1] == port


def test_range_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORT_RANGE, "20000:20009")
    with pytest.raises(CommError, match="UNISONO_PORT_RANGE is '20000:20009', which is no range of ports"):
        listen("127.0.0.1", 0)


def summed(comm: un.Communicator) -> float:
    tensor = torch.ones(1)
    comm.all_reduce(tensor)
    if comm.rank == 0:
        comm.send(tensor, 1)
    elif comm.rank == 1:
        comm.recv(tensor, 0)
    return float(tensor)


def test_ranks_connect_by_ports_of_the_range(taken: list[socket.socket]) -> None:
    while taken:
        taken.pop().close()
    assert un.launch(summed, nprocs=3, backend="tcp") == [3.0, 3.0, 3.0]


def test_every_rank_is_told_of_a_range_without_a_free_port(taken: list[socket.socket]) -> None:
    assert len(taken) == 6
    with pytest.raises(CommError, match=r"all ports of UNISONO_PORT_RANGE=.* are taken"):
        un.launch(summed, nprocs=2, backend="tcp", timeout=5)
