"""Corrupt messages are detected, with their sender."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import unisono as un
from unisono.core.transport import Transport
from unisono.core.types import Message, Send, Work
from unisono.errors import CorruptedError, DeadlockError, MismatchError
from unisono.testing import Checksummed, Delayed, Faulty, RankFaults, run_ranks
from unisono.testing.reference import DTYPES
from unisono.wrappers.base import Wrapper

BACKENDS = ("thread", "sim", "gloo", "shm")


def checksummed(**faults: Any) -> Callable[[Transport], Transport]:
    return lambda inner: Checksummed(Faulty(inner, seed=1, **faults)) if faults else Checksummed(inner)


class OneBit(Wrapper):
    """Changes one bit of one message: the one of this number that this rank sends to that one with this tag."""

    def __init__(self, inner: Transport, rank: int, number: int, tag: int, bit: int) -> None:
        super().__init__(inner)
        self._what, self._left = (rank, tag, bit), number

    def wrap_child(self, inner: Transport) -> Wrapper:
        return Plain(inner)

    def post(self, batch: list[Message]) -> Work:  # type: ignore[override]  # narrower, for this test
        rank, tag, bit = self._what
        for message in batch:
            if isinstance(message, Send) and message.tag == tag and self.rank == rank:
                self._left -= 1
                if self._left == 0:
                    message.tensor.view(torch.uint8)[bit // 8] ^= 1 << (bit % 8)
        return self.inner.post(batch)


class Plain(Wrapper):
    def wrap_child(self, inner: Transport) -> Plain:
        return Plain(inner)


def several(comm: un.Communicator) -> None:
    for number in range(4):
        t = torch.full((10,), float(number))
        comm.send(t, 1, tag=5) if comm.rank == 0 else comm.recv(t, 0, tag=5)


# Of the header in front, its number, its length and its hash, and of the content, the first and the last bit.
@pytest.mark.parametrize("bit", [0, 8 * 9, 8 * 17, 8 * 25, 8 * 33, 8 * 40, 8 * 80 - 1])
def test_any_flipped_bit_is_found_and_attributed(bit: int) -> None:
    def wrap(inner: Transport) -> Transport:
        return Checksummed(OneBit(inner, 0, 3, 5, bit))

    told, found = un.simulate(several, 2, wrap=wrap, on_failure="continue").results
    assert isinstance(found, CorruptedError)
    assert (found.rank, found.peer, found.nbytes, found.operation) == (1, 0, 40, "recv")
    assert "message 3 of tag 5 from rank 0 was corrupted" in str(found)
    # The other rank is not at fault, but gets the error.
    assert isinstance(told, CorruptedError)
    assert "rank 1 gave up in recv: message 3 of tag 5 from rank 0" in str(told)


@pytest.mark.parametrize("backend", BACKENDS)
def test_on_every_transport(backend: str) -> None:
    def program(comm: un.Communicator) -> str:
        part = comm.dup()
        t = torch.ones(100)
        try:
            part.send(t, 1) if comm.rank == 0 else part.recv(t, 0)
        except CorruptedError as error:
            return str(error)
        return "fine"

    assert run_ranks(program, 2, backend, wrap=checksummed()) == ["fine", "fine"]
    assert (
        "message 1 of tag 0 from rank 0 was corrupted"
        in run_ranks(program, 2, backend, wrap=checksummed(corrupt=1.0))[1]
    )


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"drop": 0.3}, r"message \d of tag 5 from rank 0 was lost or overtaken: message \d arrived instead"),
        ({"duplicate": 0.5}, r"message \d of tag 5 from rank 0 has not arrived yet: message \d arrived again"),
        ({"reorder": 1.0, "delay_s": 5.0}, "message 1 of tag 5 from rank 0 was lost or overtaken: message 2 arrived"),
    ],
)
def test_lost_duplicated_and_reordered_messages_are_found(faults: dict[str, Any], said: str) -> None:
    def program(comm: un.Communicator) -> None:
        tensors = [torch.full((10,), float(number)) for number in range(8)]
        works = [comm.isend(t, 1, 5) if comm.rank == 0 else comm.irecv(t, 0, 5) for t in tensors]
        for work in works:
            work.wait()

    with pytest.raises(CorruptedError, match=said):
        un.simulate(program, 2, wrap=checksummed(**faults))


@pytest.mark.parametrize("backend", ["thread", "gloo", "shm"])
def test_all_faults_work_between_real_ranks(backend: str) -> None:
    """Duplicated, reordered, late and slow messages together are detected."""

    def wrap(inner: Transport) -> Transport:
        slow = RankFaults(slow_bytes_per_s=1e6)
        return Checksummed(Faulty(inner, seed=2, duplicate=0.3, reorder=0.3, delay=0.3, delay_s=0.002, on_ranks=slow))

    def program(comm: un.Communicator) -> str:
        tensors = [torch.full((10,), float(number)) for number in range(8)]
        works = [comm.isend(t, 1) if comm.rank == 0 else comm.irecv(t, 0) for t in tensors]
        try:
            for work in works:
                work.wait()
        except CorruptedError as error:
            return str(error)
        return "fine"

    assert "of tag 0 from rank 0" in run_ranks(program, 2, backend, wrap=wrap, on_failure="continue")[1]


def test_collectives_are_covered() -> None:
    def program(comm: un.Communicator) -> None:
        for algorithm in ("ring", "halving_doubling", None):
            comm.all_reduce(torch.ones(1000), algorithm=algorithm)

    un.simulate(program, 4, wrap=checksummed())
    for seed in range(5):
        # Bits may spoil a message of any rank; its receiver names the sender.
        with pytest.raises(CorruptedError, match=r"message \d+ of tag -1 from rank \d was corrupted"):
            un.simulate(program, 4, seed=seed, wrap=lambda inner: Checksummed(Faulty(inner, seed=3, corrupt=0.2)))


def test_corrupt_message_is_not_delivered() -> None:
    def program(comm: un.Communicator) -> list[float]:
        t = torch.full((3,), float(comm.rank))
        work = comm.isend(t, 1) if comm.rank == 0 else comm.irecv(t, 0)
        errors = []
        if comm.rank == 1:
            for wait in (work.wait, work.get_future().wait, work.wait):
                with pytest.raises(CorruptedError) as caught:
                    wait()
                errors.append(caught.value)
            assert isinstance(work.exception(), CorruptedError)
            assert work.is_completed()
        return t.tolist()

    assert un.simulate(program, 2, wrap=checksummed(corrupt=1.0)).results[1] == [1.0, 1.0, 1.0]


def test_every_dtype_and_empty_tensors() -> None:
    def program(comm: un.Communicator) -> list[str]:
        wrong = []
        for dtype in DTYPES:
            for count in (0, 1, 5):
                t = torch.full((count,), float(1 - comm.rank)).to(dtype)
                comm.send(t, 1) if comm.rank == 0 else comm.recv(t, 0)
                wrong += [] if torch.equal(t, torch.ones(count).to(dtype)) else [str(dtype)]
        return wrong

    assert un.simulate(program, 2, wrap=checksummed()).results == [[], []]


def test_size_mismatch_is_reported_as_such() -> None:
    def program(comm: un.Communicator) -> None:
        comm.send(torch.ones(4), 1) if comm.rank == 0 else comm.recv(torch.ones(3), 0)

    with pytest.raises(MismatchError, match="rank 0 sent 56 elements of uint8, but the receive on rank 1 expects 52"):
        un.simulate(program, 2, wrap=checksummed())


def test_losing_all_messages_is_a_deadlock() -> None:
    def program(comm: un.Communicator) -> None:
        comm.all_reduce(torch.ones(4))

    with pytest.raises(DeadlockError, match="no rank can continue"):
        un.simulate(program, 2, wrap=checksummed(drop=1.0))


# -- delays ----------------------------------------------------------------------------------------
def test_delays_on_the_virtual_clock() -> None:
    def wrap(inner: Transport) -> Transport:
        return Delayed(inner, 10.0, bytes_per_s=8.0)

    def program(comm: un.Communicator) -> None:
        several(comm)

    # Four messages of 40 bytes, each sent when the last has been received: 10 s, and 5 s for its bytes.
    assert un.simulate(program, 2, wrap=wrap).time_s == pytest.approx(60.0, rel=0.01)
    assert un.simulate(program, 2, wrap=Delayed).time_s < 0.01


@pytest.mark.parametrize("backend", BACKENDS)
def test_delays_change_no_result(backend: str) -> None:
    def program(comm: un.Communicator) -> list[float]:
        t = torch.arange(5.0) + comm.rank
        comm.all_reduce(t)
        return t.tolist()

    found = run_ranks(program, 2, backend, wrap=lambda inner: Delayed(inner, 0.01, jitter=0.5, seed=1))
    assert found == [[1.0, 3.0, 5.0, 7.0, 9.0]] * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"latency_s": -1.0}, "latency_s and jitter must not be negative"),
        ({"jitter": -1.0}, "latency_s and jitter must not be negative"),
        ({"bytes_per_s": 0.0}, "bytes_per_s must be positive"),
    ],
)
def test_invalid_delays_are_rejected(arguments: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        un.simulate(several, 2, wrap=lambda inner: Delayed(inner, **arguments))
