"""Works of shared memory, which somebody has to see through: also when nobody waits, or the other rank has left."""

from __future__ import annotations

import threading

import pytest
import torch
from patience import until

import unisono as un
from unisono.errors import PeerLostError
from unisono.testing import pool
from unisono.transports._shm_board import Board


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
