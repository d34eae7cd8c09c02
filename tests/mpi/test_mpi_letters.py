"""Blocking messages by the shorter way of MPI: what comes is what was sent, whichever way each end takes."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import unisono as un
from unisono.errors import CommError, CommTimeoutError, MismatchError
from unisono.testing.pools import RankPool
from unisono.transports._mpi_parts import INLINE_BYTES

# Of which two write to each other: other files want three, and starting them takes seconds.
RANKS, TWO = 3, 2
MOST = INLINE_BYTES // 4


MESSAGES = st.tuples(
    st.integers(0, 1),
    st.sampled_from([0, 1, MOST - 1, MOST, MOST + 1, 5000, 300_000]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64]),
    st.sampled_from([0, 5, 300]),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=settings.default.max_examples // 2)
@given(messages=st.lists(MESSAGES, min_size=1, max_size=5), rounds=st.integers(1, 4), moved=st.integers(-1, 3))
@example([(0, MOST, torch.float32, 0, False, False), (1, MOST + 1, torch.float32, 5, False, False)], 4, 2)
def test_messages_come_as_they_were_sent(
    ranks: RankPool, messages: list[tuple[Any, ...]], rounds: int, moved: int
) -> None:
    """The same tensors again and again; before one of the rounds they get other memory."""

    def program(comm: un.Communicator, messages: list[tuple[Any, ...]], rounds: int, moved: int) -> list[bool]:
        # The first call makes this thread the owner.
        comm.barrier()
        tensors = [torch.zeros(count, dtype=dtype) for _, count, dtype, *_ in messages]
        right = []
        for number in range(rounds):
            for place, (sender, count, dtype, tag, later_out, later_in) in enumerate(messages):
                tensor, wanted = tensors[place], torch.arange(count).add(number + place).to(dtype)
                if number == moved:
                    tensor.data = torch.zeros(count, dtype=dtype)
                if comm.rank == sender:
                    tensor.copy_(wanted)
                    comm.isend(tensor, 1 - sender, tag).wait() if later_out else comm.send(tensor, 1 - sender, tag)
                else:
                    tensor.zero_()
                    comm.irecv(tensor, sender, tag).wait() if later_in else comm.recv(tensor, sender, tag)
                right.append(torch.equal(tensor, wanted))
        return right

    for right in ranks.run(program, messages, rounds, moved, size=TWO):
        assert right == [True] * (rounds * len(messages))


def test_receives_that_wait_get_long_messages_in_their_order(ranks: RankPool) -> None:
    def program(comm: un.Communicator, count: int) -> list[float]:
        comm.barrier()
        tensor, into = torch.zeros(count), [torch.zeros(count) for _ in range(6)]
        if comm.rank == 1:
            works = [comm.irecv(one, 0, 3) for one in into]
        comm.barrier()
        for number in range(6):
            if comm.rank == 0:
                comm.send(tensor.fill_(number), 1, 3)
        if comm.rank == 1:
            for work in reversed(works):
                work.wait()
        return [one.unique().item() for one in into]

    for count in (MOST + 1, 200_000):
        assert ranks.run(program, count, size=TWO)[1] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_messages_that_come_again_are_prepared_once(ranks: RankPool) -> None:
    def program(comm: un.Communicator) -> tuple[list[int], int, list[Any], list[str]]:
        comm.barrier()
        quick, activity, prepared, there = comm._engine.quick, comm._engine.activity, list[int](), torch.ones(3)
        before, anew, calls = activity.messages, quick._addressed, []
        quick._addressed = lambda name, tensor, peer, tag: prepared.append(tag) or anew(name, tensor, peer, tag)
        try:
            for number in range(5):
                tag = 2 if number < 4 else 9
                comm.send(there, 1, tag) if comm.rank == 0 else comm.recv(there, 0, tag)
                calls.append(comm._engine.activity.latest[-1][:3])
        finally:
            quick._addressed = anew
        awaited = activity.awaited
        for _ in range(3):
            comm.all_reduce(there)
        return prepared, activity.messages - before, [awaited[0][:3], activity.awaited], calls

    for rank, found in enumerate(ranks.run(program, size=TWO)):
        name = ("send", "recv")[rank]
        prepared, messages, awaited, calls = found
        assert (prepared, messages) == ([2, 2, 9], 5)
        assert awaited == [(name, 1 - rank, 9), ()]
        assert calls == [(name, None, f"rank {1 - rank}")] * 5


@pytest.mark.parametrize("other", [torch.zeros(5), torch.zeros(4, dtype=torch.int32), torch.zeros(200_000)])
def test_what_does_not_fit_is_told_after_many_that_did(ranks: RankPool, other: torch.Tensor) -> None:
    def program(comm: un.Communicator, other: torch.Tensor) -> tuple[list[str], float]:
        tensor, said = torch.full((4,), 1.0), []
        with comm.dup() as part:
            part.barrier()
            for number in range(5):
                try:
                    if comm.rank == 0:
                        part.send(other if number == 4 else tensor, 1, 1)
                    else:
                        part.recv(tensor, 0, 1)
                except CommError as error:
                    said.append(f"{type(error).__name__}: {error}")
            try:
                part.barrier(timeout=5.0)
            except CommError as error:
                said.append(type(error).__name__)
        return said, tensor.sum().item()

    sender, receiver = ranks.run(program, other, size=TWO)
    said, total = receiver
    assert said[0].startswith(MismatchError.__name__)
    assert f"{other.numel()} elements" in said[0] or str(other.dtype).removeprefix("torch.") in said[0]
    assert total == 4.0
    assert sender[0][-1] == MismatchError.__name__


def test_a_message_that_nobody_sends_is_late(ranks: RankPool) -> None:
    def program(comm: un.Communicator) -> str:
        tensor = torch.zeros(4)
        with comm.dup() as part:
            part.barrier()
            for _ in range(3):
                part.recv(tensor, 0) if comm.rank == 1 else part.send(tensor, 1)
            with pytest.raises(CommTimeoutError) as told:
                part.recv(tensor, 1 - comm.rank, timeout=0.3 if comm.rank == 1 else 20.0)
        return str(told.value)

    # Rank 0 is told at once.
    for said in ranks.run(program, size=TWO):
        assert re.search(r"waited \d\.\d s for 16 B from rank 0", said)


def test_threads_may_send_one_tensor_at_once(ranks: RankPool) -> None:
    def program(comm: un.Communicator, count: int) -> list[str]:
        wrong: list[str] = []
        with comm.dup() as shared:
            shared.share()
            shared.barrier()
            there = torch.arange(float(count))

            def work() -> None:
                mine = torch.zeros(count)
                try:
                    for _ in range(100):
                        if shared.rank == 0:
                            shared.send(there, 1, 5)
                        else:
                            shared.recv(mine.zero_(), 0, 5)
                            assert torch.equal(mine, there)
                except BaseException as error:
                    wrong.append(repr(error))

            threads = [threading.Thread(target=work) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return wrong

    for count in (10, 20_000):
        assert ranks.run(program, count, size=TWO) == [[], []]


def test_what_cannot_be_sent_is_refused_each_time(ranks: RankPool) -> None:
    def program(comm: un.Communicator) -> list[str]:
        comm.barrier()
        said = []
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)
        for _ in range(4):
            for peer, tag, tensor in ((1 - comm.rank, 0, quantized), (comm.rank, 0, torch.ones(3))):
                try:
                    comm.send(tensor, peer, tag)
                except ValueError as error:
                    said.append(str(error))
        return said

    for said in ranks.run(program, size=TWO):
        assert ["quantized" in one for one in said] == [True, False] * 4
