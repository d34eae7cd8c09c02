"""Survivors continue with a new communicator and lose nothing; stopped ranks are excluded."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from insides import engine_of
from recovery_helpers import launched, soaked, total
from small_training import Story, check, train

import unisono as un
from unisono.errors import AbortedError, ClosedError, CommError, CommTimeoutError, MismatchError, PeerLostError
from unisono.testing import run_ranks


def ends_with_an_error(comm: Any, *gone: int) -> tuple[int, int, float, str]:
    if comm.rank in gone:
        raise KeyError("this rank is gone")
    try:
        while True:
            comm.barrier()
    except CommError:
        new = comm.rebuild()
    try:
        comm.barrier()
    except ClosedError as error:
        return new.rank, new.size, total(new), str(error)
    raise AssertionError("the old one still works")


@pytest.mark.parametrize("backend", ["thread", *map(soaked, ["shm", "gloo"])])
@pytest.mark.parametrize("gone", [(1,), (0, 2)])
def test_rebuild_renumbers_survivors_in_order(backend: str, gone: tuple[int, ...]) -> None:
    ends = launched(ends_with_an_error, 4, backend, *gone)
    alive = [end for rank, end in enumerate(ends) if rank not in gone]
    assert [end[:3] for end in alive] == [(r, len(alive), float(len(alive))) for r in range(len(alive))]
    assert all("closed" in end[3] for end in alive)


def test_rebuild_without_a_failure() -> None:
    def program(comm: Any) -> tuple[float, str]:
        new = comm.rebuild()
        return total(new), engine_of(new).group.name

    assert run_ranks(program, 3) == [(3.0, "world~1")] * 3


def test_rebuild_repeatedly() -> None:
    def program(comm: Any) -> list[float]:
        totals = []
        for victim in (3, 2, 1):
            if comm.rank == victim:
                raise KeyError(victim)
            try:
                while True:
                    comm.barrier()
            except CommError:
                comm = comm.rebuild()
            totals.append(total(comm))
        return totals

    assert run_ranks(program, 4, "thread", on_failure="continue")[0] == [3.0, 2.0, 1.0]


def test_rank_dies_during_rebuild() -> None:
    """Rank 2 goes when rank 0 has asked for the new group; rank 3 when it has asked too, but is not connected."""

    def program(comm: Any) -> tuple[int, float]:
        if comm.rank == 1:
            raise KeyError("first")
        try:
            comm.barrier()
        except CommError:
            if comm.rank == 2:
                raise KeyError("second") from None
            if comm.rank == 3:
                comm._connected = lambda *_: (_ for _ in ()).throw(KeyError("third"))
            comm = comm.rebuild()
        return comm.size, total(comm)

    ends = run_ranks(program, 5, "thread", on_failure="continue")
    assert ends[0] == ends[4] == (2, 2.0)


def test_rebuild_excludes_a_stopped_rank() -> None:
    def program(comm: Any) -> Any:
        pids = comm.all_gather_object(os.getpid())
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            # The one that was stopped finds that the others had come; it learns at its next call what became of them.
            while True:
                comm.barrier(timeout=0.3)
        except CommError:
            try:
                comm = comm.rebuild(timeout=0.5 if comm.rank != 1 else 5.0)
            except AbortedError as error:
                return str(error)
            finally:
                os.kill(pids[1], signal.SIGCONT)
        return comm.size, total(comm)

    ends = launched(program, 3, "shm")
    assert ends[0] == ends[2] == (2, 2.0)
    assert "continued without it" in ends[1]


def test_wrong_arguments() -> None:
    def program(comm: Any) -> str:
        with pytest.raises(ValueError, match="a number of new ranks"):
            comm.rebuild(grow=-1)
        with pytest.raises(ValueError, match="size must be the number of ranks, without grow, not 0 with grow=0"):
            comm.rebuild(size=0)
        with pytest.raises(ValueError, match="not 3 with grow=1"):
            comm.rebuild(size=3, grow=1)
        with pytest.raises(MismatchError, match="ranks passed different grow"):
            comm.rebuild(grow=comm.rank)
        with pytest.raises(MismatchError, match=r"rank \d size=\d, others size=\d"):
            comm.rebuild(size=comm.rank + 2)
        with pytest.raises(CommTimeoutError, match="for 2 new ranks, of which 0 have joined"):
            comm.rebuild(size=4, timeout=0.1)
        with pytest.raises(CommTimeoutError, match="for 1 new ranks, of which 0 have joined"):
            comm.rebuild(grow=1, timeout=0.1)
        comm.close()
        with pytest.raises(ClosedError):
            comm.rebuild()
        return "done"

    assert run_ranks(program, 2) == ["done"] * 2


def test_step_that_never_succeeds_is_given_up() -> None:
    """Lost ranks would be replaced forever."""
    with un.init("thread") as comm:
        training = un.elastic.Recovery(comm, model=torch.nn.Linear(1, 1))
        for _ in range(10):
            training.recover(size=1)
        training.commit()
        for _ in range(10):
            training.recover(size=1)
        with pytest.raises(RuntimeError, match="ranks were lost 11 times in a row before step 2 was committed"):
            training.recover(size=1)


def test_recovery_from_two_deaths_during_an_epoch() -> None:
    """With eight ranks in test_recovery_of_eight.py."""
    deaths = {1: ("step", 2), 2: ("step", 4)}
    ends = launched(train, 4, "shm", deaths)
    stories = [end for end in ends if isinstance(end, Story)]
    assert len(stories) == 2, ends
    assert all(isinstance(ends[rank], PeerLostError) for rank in deaths)
    check(stories)
    for story in stories:
        assert story.recoveries[-1][1] == 2
        assert max(took for took, _ in story.recoveries) < 3.0


def test_rebuild_and_first_all_reduce_take_half_a_second() -> None:
    def program(comm: Any) -> float:
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                comm.barrier()
        except CommError:
            started = time.monotonic()
            comm = comm.rebuild()
            assert total(comm) == 3.0
        return time.monotonic() - started

    # Other programs run on this machine: one of three tries has to do.
    took: list[float] = []
    while min(took, default=1.0) >= 0.5 and len(took) < 3:
        took.append(max(end for end in launched(program, 4, "shm") if isinstance(end, float)))
    assert min(took) < 0.5, took


def test_slow_rank_is_synchronized() -> None:
    """Rank 0 has committed a step that rank 1 has not."""

    def program(comm: Any) -> tuple[int, float, float]:
        model = torch.nn.Linear(1, 1)
        with torch.no_grad():
            model.weight.fill_(float(comm.rank))
        training = un.elastic.Recovery(comm, model=model)
        if comm.rank == 0:
            training.commit()
        training.recover()
        return training.step, model.weight.item(), total(training.comm)

    assert run_ranks(program, 2) == [(1, 0.0, 2.0)] * 2


def test_commit_advances_each_sampler_by_its_own_unit() -> None:
    with un.init("thread") as comm:
        batches = un.data.GlobalBatchSampler(range(12), comm, batch_size=4)
        for given in ((), (4,)):
            un.elastic.Recovery(comm, batches=batches).commit(*given)
        assert batches.state_dict()["taken"] == 8
        samples = un.data.PartitionSampler(range(12), comm)
        training = un.elastic.Recovery(comm, batches=batches, samples=samples)
        with pytest.raises(TypeError, match=r"commit\(len\(batch\)\)"):
            training.commit()
        assert training.step == 0
        training.commit(4)
        assert (batches.state_dict()["taken"], samples.remaining) == (12, 8)


def test_rebuild_rejects_unsupported_state() -> None:
    with un.init() as comm, pytest.raises(TypeError, match="speed is a float, which has no state_dict"):
        un.elastic.Recovery(comm, speed=1.0)


def test_rebuild_leaves_no_thread() -> None:
    def program(comm: Any) -> list[str]:
        comm.all_reduce(torch.ones(2), async_op=True).wait()
        comm = comm.rebuild()
        deadline = time.monotonic() + 5
        names = ["world rank"]
        while any("world rank" in name for name in names) and time.monotonic() < deadline:
            names = [thread.name for thread in threading.enumerate()]
            time.sleep(0.01)
        return [name for name in names if "world rank" in name]

    assert run_ranks(program, 2) == [[], []]
