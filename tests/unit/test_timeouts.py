"""A time that is no number of seconds is refused before anything is sent, so that no rank waits for one that was."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

import unisono as un
from unisono.testing import pool

WRONG = [float("inf"), float("nan"), -1, timedelta(seconds=3), "3"]
CALLS: dict[str, Callable[[un.Communicator, object], object]] = {
    "all_reduce": lambda comm, t: comm.all_reduce(torch.ones(2), timeout=t),
    "asynchronous": lambda comm, t: comm.all_reduce(torch.ones(2), async_op=True, timeout=t),
    "barrier": lambda comm, t: comm.barrier(timeout=t),
    "monitored_barrier": lambda comm, t: comm.monitored_barrier(t),
    "send": lambda comm, t: comm.send(torch.ones(2), 1 - comm.rank, timeout=t),
    "recv": lambda comm, t: comm.recv(torch.ones(2), 1 - comm.rank, timeout=t),
    "sendrecv": lambda comm, t: comm.sendrecv(torch.ones(2), 1 - comm.rank, torch.ones(2), 1 - comm.rank, timeout=t),
    "rebuild": lambda comm, t: comm.rebuild(timeout=t),
}


@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
def test_a_wrong_time_on_one_rank_breaks_nothing(backend: str) -> None:
    def program(comm: un.Communicator) -> float:
        t = torch.ones(1)
        comm.all_reduce(t)
        for call in CALLS.values() if comm.rank == 0 else ():
            for wrong in WRONG:
                with pytest.raises((TypeError, ValueError), match=r"^timeout "):
                    call(comm, wrong)
        comm.all_reduce(t)
        work = comm.all_reduce(t, async_op=True)
        with pytest.raises(TypeError, match="timedelta"):
            work.wait(timedelta(seconds=3))
        work.wait(5)
        return t.item()

    assert pool(backend, 2).run(program) == [8.0, 8.0]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_job_refuses_it_too(wrong: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^timeout "):
        un.launch(lambda comm: None, 2, "thread", timeout=wrong)
