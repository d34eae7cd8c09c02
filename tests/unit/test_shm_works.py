"""Works of shared memory, which somebody has to see through: also when nobody waits, or the other rank has left."""

from __future__ import annotations

import os
import signal
import struct
import threading
from typing import Any, cast

import pytest
import torch
from patience import until

import unisono as un
from unisono.control import Control
from unisono.errors import CommError, PeerLostError
from unisono.group import Group
from unisono.testing import pool
from unisono.transports._shm_board import Board
from unisono.transports._shm_memory import PAGE_BYTES, meet


def forsaken(comm: un.Communicator) -> list[str]:
    """How receives end from a rank that has left: one that is asked, and one with a future."""
    part = comm.dup()
    if comm.rank == 1:
        part.close()
        comm.barrier()
        return []
    asked, promised = (part.irecv(torch.zeros(4), 1, tag=tag) for tag in range(2))
    future = promised.get_future()
    assert until(asked.is_completed)
    assert until(future.done)
    comm.barrier()
    with pytest.raises(PeerLostError):
        future.value()
    return [type(work.exception()).__name__ for work in (asked, promised)]


def test_what_comes_from_a_rank_that_has_left_ends_with_an_error() -> None:
    assert pool("shm", 2).run(forsaken)[0] == ["PeerLostError"] * 2


def futures(comm: un.Communicator) -> int:
    """Threads that see one work through whose future is asked for often."""
    if comm.rank == 1:
        comm.barrier()
        comm.send(torch.ones(1), 0)
        return 0
    work = comm.irecv(torch.zeros(1), 1)
    all_of_them = [work.get_future() for _ in range(8)]
    busy = sum(thread.name == "unisono shared memory" for thread in threading.enumerate())
    comm.barrier()
    for future in all_of_them:
        future.wait()
    return busy


def test_a_work_is_seen_through_by_one_thread() -> None:
    assert un.launch(futures, 2, "shm", timeout=20)[0] == 1


def test_a_rank_that_left_after_its_message_was_taken_is_not_missed() -> None:
    words = memoryview(bytearray(Board.nbytes(2))).cast("Q")
    board = Board(words, 0, 0, 2)
    Board(words, 0, 1, 2).leave()
    awaited = [1]

    def taken_by_another_thread() -> bool:
        awaited.clear()
        return False

    board.check(taken_by_another_thread, lambda: list(awaited))
    with pytest.raises(PeerLostError, match="rank 1 has left"):
        board.check(lambda: False, lambda: [1])


class Deadly:
    """A control plane by which rank 0 dies as soon as it has told where its memory is."""

    def __init__(self, control: Any, pid: int) -> None:
        self._control, self._pid = control, pid

    def get(self, key: str, timeout: float, group: Group) -> bytes:
        card: bytes = self._control.get(key, timeout, group)
        os.kill(self._pid, signal.SIGKILL)
        return card

    def __getattr__(self, name: str) -> Any:
        return getattr(self._control, name)


def outlives_the_memory(comm: un.Communicator) -> str:
    group, control = comm._engine.group, comm._engine.control
    [pid, _] = comm.all_gather_object(os.getpid())
    if comm.rank == 0:
        control.set(f"{group.name}/of the dead", struct.pack("<qqq16s", pid, 1 << 20, PAGE_BYTES, bytes(16)))
        control.get("never", 20.0)
    with pytest.raises(CommError) as caught:
        meet(group, cast("Control", Deadly(control, pid)), "of the dead", PAGE_BYTES, 20.0)
    return type(caught.value).__name__


def test_memory_that_went_with_its_rank_is_a_lost_rank() -> None:
    assert un.launch(outlives_the_memory, 2, "shm", timeout=20, on_failure="continue")[1] == "PeerLostError"
