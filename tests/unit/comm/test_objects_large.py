"""Objects beyond 2 and 4 GiB, whose lengths fit into no C int."""

from __future__ import annotations

import pytest

import unisono as un


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("gibibytes", [2, 4])
def test_object_beyond_an_int_arrives_whole(gibibytes: int) -> None:
    assert un.launch(broadcast, 2, "shm", ((gibibytes << 30) + 5,), timeout=300) == [True, True]


def broadcast(comm: un.Communicator, length: int) -> bool:
    found = comm.broadcast_object(b"a" * (length - 1) + b"z" if comm.rank == 0 else None, 0)
    return len(found) == length and found[:1] == b"a" and found[-1:] == b"z"
