"""Messages that wait for room: broken off half way, and on lines with high numbers; what a mailbox keeps of them."""

from __future__ import annotations

import os
import resource
import weakref

import pytest
import torch

import unisono as un
from unisono.errors import PeerLostError
from unisono.testing import pool

LIMIT_S = 30.0
LONG = 32 << 20
MANY = 1100


def interrupted(comm: un.Communicator) -> str:
    """Return the error of a send after one that was interrupted in the middle of a message."""
    box, _ = comm.mailbox(None)
    said = ""
    if comm.rank == 0:

        def interrupt() -> None:
            raise KeyboardInterrupt

        box.on_stall = interrupt
        with pytest.raises(KeyboardInterrupt):
            box.send(1, b"", [torch.zeros(LONG, dtype=torch.uint8)], LIMIT_S)
        with pytest.raises(PeerLostError) as told:
            box.send(1, b"next", [], LIMIT_S)
        said = str(told.value)
    comm.barrier()
    box.close()
    return said


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_nothing_is_sent_after_an_aborted_message(backend: str) -> None:
    said, _ = pool(backend, 2).run(interrupted)
    assert said == "a message to rank 1 was aborted by KeyboardInterrupt"


def with_many_files(comm: un.Communicator) -> tuple[int, int]:
    """Return how often a long message stalls on a descriptor beyond the limit of select(), and the received data."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard < 4 * MANY else max(soft, 4 * MANY), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(MANY)]
    stalls: list[None] = []
    arrived = 0
    try:
        box, _ = comm.mailbox(None)
        if comm.rank == 0:
            box.on_stall = lambda: stalls.append(None)
            box.send(1, b"", [torch.ones(LONG, dtype=torch.uint8)], LIMIT_S)
        else:
            mails = []
            while not mails:
                box.wait(LIMIT_S)
                mails = box.poll()
            arrived = int(mails[0].bodies[0].count_nonzero())
        comm.barrier()
        box.close()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return len(stalls), arrived


def test_more_descriptors_than_fd_setsize() -> None:
    (stalls, _), (_, arrived) = pool("gloo", 2).run(with_many_files)
    assert stalls
    assert arrived == LONG


def kept(comm: un.Communicator) -> bool:
    """Return whether the mailbox still holds the last message after delivery."""
    box, _ = comm.mailbox(None)
    if comm.rank == 0:
        box.send(1, b"", [torch.ones(LONG, dtype=torch.uint8)], LIMIT_S)
        found = False
    else:
        mails = []
        while not mails:
            box.wait(LIMIT_S)
            mails = box.poll()
        body = weakref.ref(mails[0].bodies[0])
        assert body() is not None
        del mails
        found = body() is not None
    comm.barrier()
    box.close()
    return found


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_delivered_message_is_not_kept(backend: str) -> None:
    assert pool(backend, 2).run(kept) == [False, False]


def emptied(comm: un.Communicator) -> bool:
    """A sender finds the ring full, and all of it is read before it begins to wait."""
    box, _ = comm.mailbox(None)
    arrived = 0
    if comm.rank == 0:
        real, left = box._make_room, []

        def late(out: object, peer: int, deadline: float) -> None:
            while not out.room:
                pass
            left.append(peer)
            real(out, peer, deadline)

        box._make_room = late
        box.send(1, b"", [torch.ones(LONG, dtype=torch.uint8)], 5.0)
        arrived = LONG if left else 0
    else:
        mails = []
        while not mails:
            box.wait(LIMIT_S)
            mails = box.poll()
        arrived = mails[0].bodies[0].numel()
    comm.barrier()
    box.close()
    return arrived == LONG


def test_emptied_ring_is_not_waited_for() -> None:
    assert all(pool("shm", 2).run(emptied))
