"""Mailboxes: every transport's passes the same checks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch

import unisono as un
from unisono.comm.mailbox import PointToPointMailbox
from unisono.control.sockets import Hello
from unisono.core.transport import Envelope, Mailbox, Transport
from unisono.errors import ClosedError, CommError, PeerLostError
from unisono.testing import pool, run_ranks
from unisono.wrappers.trace import Traced

BACKENDS = ["thread", "shm", "gloo"]
LIMIT_S = 30.0
SIZES = [0, 1, 7, 8, 100, 2040, 2048, 5000, 262_143, 262_144, 300_001]


def collect(box: Mailbox, count: int) -> list[Envelope]:
    """The next messages."""
    mails: list[Envelope] = []
    deadline = time.monotonic() + LIMIT_S
    while len(mails) < count and time.monotonic() < deadline:
        mails += box.poll()
        if len(mails) < count:
            box.wait(0.2)
    assert len(mails) == count
    return mails


def body(length: int, seed: int) -> torch.Tensor:
    return (torch.arange(length) * 7 + seed).to(torch.uint8)


def in_the_background(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def exchange(comm: un.Communicator) -> int:
    """All ranks send messages of all sizes to all ranks concurrently, more than fits into any buffer."""
    box, cards = comm.mailbox(f"card {comm.rank}")
    assert cards == [f"card {rank}" for rank in range(comm.size)]
    peers = [peer for peer in range(comm.size) if peer != comm.rank]
    errors: list[BaseException] = []

    def send() -> None:
        try:
            for number, size in enumerate(SIZES):
                for peer in peers:
                    content = body(size, comm.rank), body(SIZES[-1 - number], peer)
                    box.send(peer, bytes([number]) * (size % 5000), content, LIMIT_S)
                    # What was sent may be changed.
                    content[0].zero_()
        except BaseException as error:
            errors.append(error)

    sender = in_the_background(send)
    mails = collect(box, len(SIZES) * len(peers))
    sender.join(LIMIT_S)
    assert not errors, errors
    for peer in peers:
        mine = [mail for mail in mails if mail.peer == peer]
        for number, (mail, size) in enumerate(zip(mine, SIZES, strict=True)):
            assert mail.head == bytes([number]) * (size % 5000)
            first, second = mail.bodies
            assert torch.equal(first, body(size, peer))
            assert torch.equal(second, body(SIZES[-1 - number], comm.rank))
    comm.barrier()
    box.close()
    return len(mails)


@pytest.mark.parametrize("backend", BACKENDS)
def test_messages_of_all_sizes_arrive_in_order(backend: str) -> None:
    assert pool(backend).run(exchange, size=3) == [2 * len(SIZES)] * 3


def test_every_transport_has_a_mailbox() -> None:
    def wrap(inner: Transport) -> Transport:
        return Traced(inner, lambda event: None)

    def program(comm: un.Communicator) -> bool:
        box, _ = comm.mailbox()
        own = isinstance(box, PointToPointMailbox)
        box.close()
        return own and exchange(comm) > 0

    assert run_ranks(program, 2, "thread", wrap=wrap) == [True, True]


def test_several_hosts_without_a_mailbox_of_their_own_have_one() -> None:
    assert run_ranks(exchange, 3, "thread+thread", hosts=[[0, 1], [2]]) == [2 * len(SIZES)] * 3


def one_gone(comm: un.Communicator) -> str:
    """Rank 1 is lost to the others; these go on."""
    box, _ = comm.mailbox()
    text = ""
    if comm.rank != 1:
        box.mark_lost(1, PeerLostError("rank 1 was lost", peer=1))
        try:
            box.send(1, b"anybody there?", (), 1.0)
        except PeerLostError as error:
            text = str(error)
        other = 2 - comm.rank
        box.send(other, b"hello", (), LIMIT_S)
        assert [mail.head for mail in collect(box, 1)] == [b"hello"]
    comm.barrier()
    box.close()
    try:
        box.send(1 if comm.rank == 0 else 0, b"", (), 1.0)
    except (ClosedError, PeerLostError):
        return text
    return "sent after the end"


@pytest.mark.parametrize("backend", BACKENDS)
def test_lost_rank_does_not_affect_others(backend: str) -> None:
    assert pool(backend).run(one_gone, size=3) == ["rank 1 was lost", "", "rank 1 was lost"]


def waits(comm: un.Communicator) -> tuple[bool, bool, bool]:
    """A wait ends by its time, by a nudge, also by one that came before, and by a message."""
    box, _ = comm.mailbox()
    started = time.monotonic()
    box.wait(0.05)
    box.poll()
    by_time = time.monotonic() - started < LIMIT_S / 2
    started = time.monotonic()
    box.wake()
    box.wait(LIMIT_S)
    nudger = in_the_background(box.wake)
    box.wait(LIMIT_S)
    nudger.join()
    by_nudge = time.monotonic() - started < LIMIT_S
    comm.barrier()
    started = time.monotonic()
    sender = in_the_background(lambda: box.send(1 - comm.rank, b"!", (), LIMIT_S))
    while not box.poll():
        box.wait(LIMIT_S)
    by_message = time.monotonic() - started < LIMIT_S
    sender.join()
    comm.barrier()
    box.close()
    return by_time, by_nudge, by_message


@pytest.mark.parametrize("backend", BACKENDS)
def test_waits_end(backend: str) -> None:
    assert pool(backend).run(waits, size=2) == [(True, True, True)] * 2


def hushed(comm: un.Communicator) -> bool:
    """The polling thread gets the message; the waiting one sleeps, and is woken when the other stops polling."""
    box, _ = comm.mailbox()
    woken = threading.Event()
    if comm.rank == 0:
        box.mute_wakeups()
        waiter = in_the_background(lambda: (box.wait(LIMIT_S), woken.set())[1])
        comm.barrier()
        deadline = time.monotonic() + LIMIT_S
        mails: list[Envelope] = []
        while not mails and time.monotonic() < deadline:
            mails = box.poll()
        assert [mail.head for mail in mails] == [b"first"]
        comm.barrier()
        comm.barrier()
        # The second message has arrived, and is not read.
        box.unmute()
        waiter.join(LIMIT_S)
    else:
        comm.barrier()
        box.send(0, b"first", (), LIMIT_S)
        comm.barrier()
        box.send(0, b"second", (), LIMIT_S)
        comm.barrier()
        woken.set()
    assert woken.is_set()
    comm.barrier()
    box.close()
    return True


def test_polling_rank_is_not_woken() -> None:
    assert pool("shm").run(hushed, size=2) == [True, True]


def test_rank_with_a_failed_proof_is_reported_to_the_others() -> None:
    def program(comm: un.Communicator) -> str:
        # The higher rank connects, and finds that whatever answers does not know the secret.
        with (
            mock.patch.object(Hello, "accepts", return_value=comm.rank == 0),
            pytest.raises(CommError) as told,
        ):
            comm.mailbox()
        return str(told.value)

    there, here = run_ranks(program, 2, "gloo", timeout=60.0)
    assert "is not rank 0" in here
    assert "rank 1 gave up in mailbox: the program at" in there
