"""Timeouts are seconds or a `timedelta`; others are refused before anything is sent, so that no rank waits for one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono as un
from unisono.core.work import resolve_timeout, wait_any
from unisono.testing import RankPool, pool

LONG, SHORT = timedelta(minutes=5), timedelta(milliseconds=50)
WRONG = [float("inf"), float("nan"), -1, timedelta(seconds=-3), timedelta.max, "3", True]
Call = Callable[[un.Communicator, Any], object]


def exchange(comm: un.Communicator, t: Any) -> None:
    comm.send(torch.ones(2), 1, timeout=t) if comm.rank == 0 else comm.recv(torch.ones(2), 0, timeout=t)


def message_from_any(comm: un.Communicator, t: Any) -> None:
    if comm.rank == 0:
        comm.send(torch.ones(2), 1, timeout=t)
    else:
        assert comm.probe(timeout=t) == comm.recv(torch.ones(2), timeout=t) == 0


CALLS: dict[str, Call] = {
    "all_reduce": lambda comm, t: comm.all_reduce(torch.ones(2), timeout=t),
    "by an algorithm": lambda comm, t: comm.all_reduce(torch.ones(2), algorithm="ring", timeout=t),
    "asynchronous": lambda comm, t: comm.all_reduce(torch.ones(2), async_op=True, timeout=t).wait(),
    "all_gather_v": lambda comm, t: comm.all_gather_v(torch.ones(comm.rank), timeout=t),
    "gather_v": lambda comm, t: comm.gather_v(torch.ones(comm.rank), timeout=t),
    "scatter_v, asynchronous": lambda comm, t: comm.scatter_v(
        [torch.ones(r) for r in range(2)] if comm.rank == 0 else None, async_op=True, timeout=t
    ).result(t),
    "broadcast_object": lambda comm, t: comm.broadcast_object("some", timeout=t),
    "all_gather_object": lambda comm, t: comm.all_gather_object("some", timeout=t),
    "gather_object": lambda comm, t: comm.gather_object("some", timeout=t),
    "scatter_object": lambda comm, t: comm.scatter_object([1, 2] if comm.rank == 0 else None, timeout=t),
    "barrier": lambda comm, t: comm.barrier(timeout=t),
    "monitored_barrier": lambda comm, t: comm.monitored_barrier(t),
    "message": exchange,
    "any source": message_from_any,
    "sendrecv": lambda comm, t: comm.sendrecv(torch.ones(2), 1 - comm.rank, torch.ones(2), 1 - comm.rank, timeout=t),
    "rebuild": lambda comm, t: comm.rebuild(timeout=t),
}


def ended_by_the_short_one(error: un.errors.CommTimeoutError) -> bool:
    """Return whether the wait was nearer to the short timeout than to the long one.

    The error's seconds are those of the last wait, which is shorter than the timeout where the call had to wait for
    the processor first, and longer where the thread was woken late.
    """
    assert error.waited_s is not None
    return error.waited_s < LONG.total_seconds() / 2


def takes_timeouts(comm: un.Communicator) -> tuple[float, list[bool]]:
    """Make all calls with a `timedelta`, and let waits end by one."""
    for name, call in CALLS.items():
        if name != "rebuild":
            call(comm, LONG)
    for work in (
        comm.all_reduce(torch.ones(2), async_op=True),
        comm.isend(torch.ones(2), 1) if comm.rank == 0 else comm.irecv(torch.ones(2), 0),
    ):
        wait_any([work], LONG)
        work.wait(LONG)
    late = []
    if comm.rank == 1:
        receive = comm.irecv(torch.ones(2), 0, tag=1)
        waits: list[Callable[[], object]] = [
            lambda: receive.wait(SHORT),
            lambda: wait_any([receive], SHORT),
            lambda: comm.probe(tag=2, timeout=SHORT),
        ]
        for wait in waits:
            with pytest.raises(un.errors.CommTimeoutError) as caught:
                wait()
            late.append(ended_by_the_short_one(caught.value))
    comm.barrier()
    if comm.rank == 0:
        comm.send(torch.ones(2), 1, tag=1)
    else:
        receive.wait(LONG)
    last = comm.rebuild(timeout=LONG)
    t = torch.ones(1)
    last.all_reduce(t, timeout=LONG)
    return t.item(), late


@pytest.mark.parametrize("backend", ["thread", "shm", "gloo", "sim"])
def test_timedeltas_are_timeouts(backend: str) -> None:
    assert un.launch(takes_timeouts, 2, backend, timeout=LONG) == [(2.0, []), (2.0, [True, True, True])]


def waits_for_the_other(comm: un.Communicator) -> bool:
    """Rank 1 comes once rank 0 has given up."""
    if comm.rank == 1:
        with pytest.raises(un.CommError):
            comm.recv(torch.zeros(1), 0)
        return True
    with pytest.raises(un.errors.CommTimeoutError) as caught:
        comm.all_gather_object("some", timeout=SHORT)
    return ended_by_the_short_one(caught.value)


@pytest.mark.parametrize("backend", ["thread", "shm"])
def test_exchange_of_objects_ends_by_its_timeout(backend: str) -> None:
    assert un.launch(waits_for_the_other, 2, backend, timeout=LONG) == [True, True]


def remote_calls(comm: un.Communicator) -> list[int]:
    agent = un.rpc.init(comm, timeout=LONG, trusted=True)
    peer = 1 - comm.rank
    found = [
        un.rpc.rpc_sync(peer, divmod, (7, 4), timeout=LONG)[0],
        un.rpc.rpc_async(peer, divmod, (7, 4), timeout=LONG).wait()[0],
        un.rpc.remote(peer, divmod, (7, 4), timeout=LONG).to_here(LONG)[0],
        un.rpc.RRef([1]).rpc_sync(LONG).count(1),
        agent.rpc_sync(peer, divmod, (7, 4))[0],
    ]
    un.rpc.shutdown(timeout=LONG)
    return found


def test_remote_calls_take_timedeltas() -> None:
    assert un.launch(remote_calls, 2, "thread", timeout=30) == [[1] * 5] * 2


def test_checkpoints_take_timedeltas(tmp_path: Path) -> None:
    def program(comm: un.Communicator, path: str) -> float:
        un.checkpoint.save(path, {"w": torch.ones(2)}, comm, timeout=LONG)
        saving = un.checkpoint.async_save(path, {"w": torch.full((2,), 2.0)}, comm, timeout=LONG)
        saving.wait(LONG)
        assert saving.exception(LONG) is None
        state = {"w": torch.zeros(2)}
        un.checkpoint.load(path, state, comm, timeout=LONG)
        return state["w"].sum().item()

    assert un.launch(program, 2, "thread", args=(str(tmp_path),), timeout=30) == [4.0, 4.0]


def test_jobs_take_timedeltas() -> None:
    comm = un.init(timeout=LONG)
    comm.barrier()
    comm.close()
    assert un.simulate(lambda comm: comm.rank, 2, timeout=LONG).results == [0, 1]
    with RankPool(2, "gloo", timeout=LONG) as ranks:
        assert ranks.run(lambda comm: comm.rank) == [0, 1]
    assert un.testing.World("thread", timeout=LONG).run(lambda comm: comm.rank) == [0, 1]
    with pytest.raises(un.CommError, match="process 4194304 "):
        un.join(pid=2**22, timeout=SHORT)


@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
def test_invalid_timeout_on_one_rank_breaks_nothing(backend: str) -> None:
    def program(comm: un.Communicator) -> float:
        t = torch.ones(1)
        comm.all_reduce(t)
        for call in CALLS.values() if comm.rank == 0 else ():
            for wrong in WRONG:
                with pytest.raises((TypeError, ValueError), match=r"^timeout "):
                    call(comm, wrong)
        comm.all_reduce(t)
        work = comm.all_reduce(t, async_op=True)
        with pytest.raises(TypeError, match="number of seconds or a timedelta, not a str"):
            work.wait("3")  # type: ignore[arg-type]  # wrong on purpose
        work.wait(60.0)
        return t.item()

    assert pool(backend, 2).run(program) == [8.0, 8.0]


@pytest.mark.parametrize("wrong", [*WRONG, 0, timedelta(0), None])
def test_a_job_refuses_it_too(wrong: Any) -> None:
    for start in (
        lambda: un.launch(lambda comm: None, 2, "thread", timeout=wrong),
        lambda: un.simulate(lambda comm: None, 2, timeout=wrong),
        lambda: un.init(timeout=wrong),
        lambda: un.join(pid=1, timeout=wrong),
    ):
        with pytest.raises((TypeError, ValueError), match=r"^timeout "):
            start()


def test_launch_rejects_invalid_timeouts() -> None:
    assert [resolve_timeout(t, 9.0) for t in (None, 0, 1.5, timedelta(hours=1))] == [9.0, 0, 1.5, 3600.0]
