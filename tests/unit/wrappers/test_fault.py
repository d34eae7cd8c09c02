"""Faults on purpose: repeatable, in order, and only those that were asked for."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import unisono as un
from unisono.core.group import Group
from unisono.core.transport import Transport
from unisono.core.types import Message, Recv, Send, Work
from unisono.core.work import Completion
from unisono.errors import AbortedError, CommTimeoutError
from unisono.testing import Faulty, RankFaults, run_ranks
from unisono.wrappers.base import Wrapper
from unisono.wrappers.fault import KilledError

COUNT = 200


class Recorder(Transport):
    """Records posted messages; each is complete immediately."""

    in_process = True

    def __init__(self, group: Group | None = None) -> None:
        self.group = group or Group.world(0, 3)
        self.posted: list[Message] = []

    def post(self, batch: Sequence[Message]) -> Work:
        self.posted += batch
        work = Completion(1.0)
        work.complete()
        return work

    def split(self, group: Group) -> Recorder:
        return Recorder(group)

    def close(self) -> None:
        pass

    def abort(self, cause: BaseException) -> None:
        pass

    @property
    def numbers(self) -> list[int]:
        return [int(message.tensor) for message in self.posted]


def message(number: int, peer: int = 1, tag: int = 0) -> Send:
    return Send(torch.tensor(number), peer, tag)


def survivors(seed: int, **faults: Any) -> list[int]:
    inner = Recorder()
    faulty = Faulty(inner, seed=seed, **faults)
    for number in range(COUNT):
        faulty.post([message(number)]).wait(1.0)
    return inner.numbers


def faulty(**faults: Any) -> Callable[[Transport], Transport]:
    return functools.partial(Faulty, **faults)


def test_messages_pass_without_faults() -> None:
    assert survivors(0) == list(range(COUNT))


def test_drop_rate_is_as_requested_and_repeatable() -> None:
    arrived = survivors(1, drop=0.3)
    assert 0.6 * COUNT < len(arrived) < 0.8 * COUNT
    assert survivors(1, drop=0.3) == arrived
    assert survivors(2, drop=0.3) != arrived
    assert survivors(1, drop=1.0) == []


def test_decisions_are_independent_of_other_messages() -> None:
    inner = Recorder()
    faulty = Faulty(inner, seed=1, drop=0.3)
    for number in range(COUNT):
        faulty.post([message(-1, peer=2), message(number), message(-1, tag=3)]).wait(1.0)
    assert [n for n in inner.numbers if n >= 0] == survivors(1, drop=0.3)


def test_receives_are_never_dropped() -> None:
    inner = Recorder()
    Faulty(inner, seed=0, drop=1.0).post([Recv(torch.tensor(0), 1), message(1)]).wait(1.0)
    assert [type(m) for m in inner.posted] == [Recv]


def test_delays_keep_message_order() -> None:
    inner = Recorder()
    late = Faulty(inner, seed=1, delay=0.3, delay_s=0.001)
    works = [late.post([message(number), message(number, tag=1), message(number, peer=2)]) for number in range(50)]
    for work in works:
        work.wait(60.0)
    for peer, tag in ((1, 0), (1, 1), (2, 0)):
        sent = [int(m.tensor) for m in inner.posted if (m.peer, m.tag) == (peer, tag)]
        assert sent == list(range(50))


def test_delay_does_not_block_the_caller_or_other_streams() -> None:
    inner = Recorder()
    late = Faulty(inner, seed=0, delay=1.0, delay_s=0.2)
    started = time.monotonic()
    work = late.post([message(1), Recv(torch.tensor(2), 1)])
    # The other message waits, and this rank does not.
    assert inner.numbers == [2]
    assert not work.is_completed()
    with pytest.raises(CommTimeoutError):
        work.wait(0.01)
    work.wait(60.0)
    assert time.monotonic() - started >= 0.2
    assert inner.numbers == [2, 1]
    assert (work.is_completed(), work.exception()) == (True, None)


def test_abort_ends_delayed_messages() -> None:
    inner = Recorder()
    late = Faulty(inner, seed=0, delay=1.0, delay_s=60.0)
    work = late.post([message(1)])
    future = work.get_future()
    late.abort(AbortedError("enough"))
    with pytest.raises(AbortedError, match="enough"):
        work.wait(60.0)
    assert isinstance(work.exception(), AbortedError)
    with pytest.raises(AbortedError, match="enough"):
        future.wait()
    assert inner.numbers == []


def test_receiver_times_out_on_a_dropped_message() -> None:
    over = threading.Event()

    def program(comm: un.Communicator) -> str:
        if comm.rank == 0:
            comm.send(torch.ones(1), 1)
            # Nothing comes from a rank that has left.
            assert over.wait(30)
            return "sent"
        try:
            comm.irecv(torch.ones(1), 0).wait(0.1)
        except CommTimeoutError as error:
            return str(error)
        finally:
            over.set()
        return "received"

    sent, missed = run_ranks(program, 2, wrap=faulty(seed=0, drop=1.0))
    assert sent == "sent"
    assert "from rank 0" in missed


def test_collectives_are_affected_and_native_ones_hidden() -> None:
    def program(comm: un.Communicator) -> None:
        comm.all_reduce(torch.ones(4), timeout=0.2)

    for backend in ("thread", "gloo"):
        with pytest.raises(CommTimeoutError):
            run_ranks(program, 2, backend, wrap=faulty(seed=0, drop=1.0))


def test_duplicate_arrives_twice() -> None:
    arrived = survivors(1, duplicate=0.3)
    twice = [number for number in range(COUNT) if arrived.count(number) == 2]
    assert arrived == sorted(arrived)
    assert 0.2 * COUNT < len(twice) < 0.4 * COUNT
    assert set(arrived) == set(range(COUNT))
    assert survivors(1, duplicate=0.3) == arrived


def test_reordered_message_arrives_after_the_next() -> None:
    inner = Recorder()
    swapping = Faulty(inner, seed=2, reorder=0.3, delay_s=60.0)
    # The last one waits for a next one, which does not come.
    works = [swapping.post([message(number)]) for number in range(50)]
    swapping.post([message(0, tag=1)])
    for work in works[:40]:
        work.wait(60.0)
    numbers = [int(m.tensor) for m in inner.posted if m.tag == 0]
    assert numbers != sorted(numbers)
    assert all(abs(number - place) <= 1 for place, number in enumerate(numbers[:40]))
    swapping.abort(AbortedError("enough"))


def test_corruption_flips_one_bit_of_a_copy() -> None:
    inner = Recorder()
    spoiling = Faulty(inner, seed=1, corrupt=1.0)
    sent = [torch.randn(100), torch.zeros(7, dtype=torch.bool), torch.arange(3), torch.zeros(0)]
    kept = [t.clone() for t in sent]
    for t in sent:
        spoiling.post([Send(t, 1)]).wait(1.0)
    assert all(torch.equal(t, k) for t, k in zip(sent, kept, strict=True))
    for t, got in zip(sent, inner.posted, strict=True):
        bits = (t.view(torch.uint8) ^ got.tensor.view(torch.uint8)).tolist()
        assert sum(byte.bit_count() for byte in bits) == (1 if t.numel() else 0)


def test_frozen_rank_returns_or_is_released_by_abort() -> None:
    for freeze_s in (0.05, None):
        inner = Recorder()
        frozen = Faulty(inner, seed=0, on_ranks=RankFaults(freeze_at=2, freeze_s=freeze_s))
        frozen.post([message(1)])
        started = time.monotonic()
        thread = threading.Thread(target=frozen.post, args=([message(2)],))
        thread.start()
        if freeze_s is None:
            assert inner.numbers == [1]
            frozen.abort(AbortedError("enough"))
        thread.join(60.0)
        assert time.monotonic() - started >= (freeze_s or 0.0)
        assert inner.numbers == [1, 2]


def test_slow_link_serializes_bytes() -> None:
    def program(comm: un.Communicator) -> float:
        started = time.monotonic()
        tensors = [torch.zeros(1000, dtype=torch.uint8) for _ in range(3)]
        works = [comm.isend(t, 1) if comm.rank == 0 else comm.irecv(t, 0) for t in tensors]
        for work in works:
            work.wait()
        return time.monotonic() - started

    found = un.simulate(program, 2, faults={"on_ranks": RankFaults(slow_bytes_per_s=1000.0, ranks=[0])}).results
    assert all(3.0 <= time_s < 3.1 for time_s in found), found
    other = {"on_ranks": RankFaults(slow_bytes_per_s=1000.0, ranks=[1])}
    assert max(un.simulate(program, 2, faults=other).results) < 0.1


def test_faults_apply_to_subgroups() -> None:
    configured: dict[str, Any] = {
        "seed": 3,
        "drop": 0.1,
        "delay": 0.2,
        "duplicate": 0.3,
        "reorder": 0.4,
        "corrupt": 0.5,
    }
    on_ranks = RankFaults(kill_at=7, freeze_at=8, freeze_s=9.0, slow_bytes_per_s=10.0, ranks=[1])
    configured |= {"delay_s": 1.0, "on_ranks": on_ranks}
    part = Faulty(Recorder(), **configured).split(Group("world/part", 0, (1, 2)))
    assert isinstance(part, Faulty)
    assert {name: getattr(part._faults, name) for name in configured} == configured
    # In the part, rank 0 is rank 1 of the job.
    assert part._rank_faults.kill_at == 7


def test_kill_reaches_the_wrapped_transport() -> None:
    class Plain(Wrapper):
        def wrap_child(self, inner: Transport) -> Plain:
            return Plain(inner)

    with pytest.raises(KilledError, match="rank 0 of 3 was killed at its post 1"):
        Faulty(Plain(Recorder()), seed=0, on_ranks=RankFaults(kill_at=1)).post([message(1)])


def test_subgroups_have_the_same_faults() -> None:
    part = Faulty(Recorder(), seed=1, drop=1.0).split(Group("world/part", 0, (0, 1)))
    part.post([message(1)]).wait(1.0)
    assert isinstance(part, Faulty)
    assert isinstance(part.inner, Recorder)
    assert part.group.name == "world/part"
    assert part.inner.posted == []


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"drop": 1.5}, "drop must be a probability from 0 to 1, not 1.5"),
        ({"delay": -0.1}, "delay must be a probability"),
        ({"delay_s": -1.0}, "delay_s must not be negative"),
        ({"corrupt": 7}, "corrupt must be a probability from 0 to 1, not 7"),
    ],
)
def test_invalid_faults_are_rejected(faults: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Faulty(Recorder(), seed=0, **faults)


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"kill_at": 0}, "kill_at must be at least 1"),
        ({"kill_at": 1.5}, "kill_at must be at least 1 and a whole number, not 1.5"),
        ({"freeze_at": -1}, "freeze_at must be at least 1"),
        ({"freeze_s": -1.0}, "freeze_s must not be negative"),
        ({"slow_bytes_per_s": 0}, "slow_bytes_per_s must be positive"),
        ({"ranks": 1}, r"ranks must be a sequence of ranks such as \[1\], not 1"),
    ],
)
def test_invalid_faults_of_ranks_are_rejected(faults: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        RankFaults(**faults)
