"""Calls that end early, and ends of communicators with calls under way."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from insides import engine_of
from waiting import wait_until

import unisono as un
from unisono.testing import run_ranks


class InterruptError(Exception):
    """Exception of a signal handler."""


def _interrupt(*_: object) -> None:
    raise InterruptError("enough")


def test_interrupted_call_does_not_affect_the_next() -> None:
    def program(comm: un.Communicator) -> str:
        # The first call finds out whose communicator it is; the short way is for those after it.
        comm.all_reduce(torch.ones(4))
        if comm.rank == 1:
            with pytest.raises(un.errors.PeerLostError, match="rank 0 failed in all_reduce: InterruptError"):
                comm.monitored_barrier()
            return "told"
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(InterruptError):
            comm.all_reduce(torch.ones(4))
        with pytest.raises(un.errors.CommError, match="InterruptError"):
            comm.all_reduce(torch.full((4,), 100.0))
        return "broken"

    assert run_ranks(program, 2, "shm", timeout=60.0) == ["broken", "told"]


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_nested_collective_is_rejected_and_the_outer_one_completes(
    backend: str, async_op: bool, tmp_path: Path
) -> None:
    def program(comm: un.Communicator, async_op: bool, handled: Path) -> tuple[list[str], list[list[float]]]:
        tensors, said = [torch.ones(2) for _ in range(4)], []

        def handler(*_: object) -> None:
            try:
                comm.all_reduce(torch.ones(3), async_op=async_op)
            except un.errors.CommError as error:
                said.append(str(error))
            (handled / str(len(said))).touch()

        activity = engine_of(comm).activity

        def interrupt() -> None:
            while not activity.inside:
                os.sched_yield()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

        signal.signal(signal.SIGALRM, handler)
        for number, t in enumerate(tensors, 1):
            if comm.rank == 0:
                threading.Thread(target=interrupt).start()
            else:
                # The last to come, so that the other waits.
                wait_until((handled / str(number)).exists, 30.0)
            comm.all_reduce(t)
        return said, [t.tolist() for t in tensors]

    (said, found), (_, others) = run_ranks(program, 2, backend, async_op, tmp_path, timeout=30)
    assert found == others == [[2.0, 2.0]] * 4
    assert len(said) == 4
    for number, text in enumerate(said, 1):
        assert f"all_reduce was called inside all_reduce #{number} (sum" in text
        assert "Set a flag in the handler" in text


def test_wrong_argument_on_the_fast_path_breaks_nothing() -> None:
    def program(comm: un.Communicator) -> list[float]:
        t = torch.ones(2)
        comm.all_reduce(t)
        with pytest.raises(ValueError, match="unknown reduce operation"):
            comm.all_reduce(t, "mean")
        comm.all_reduce(t)
        return t.tolist()

    assert run_ranks(program, 2, "shm", timeout=60.0) == [[4.0, 4.0]] * 2


def test_close_completes_started_calls() -> None:
    def program(comm: un.Communicator) -> list[float]:
        tensors = [torch.ones(1) for _ in range(5)]
        works = [comm.all_reduce(t, async_op=True) for t in tensors]
        comm.close()
        for work in works:
            work.wait()
        return [t.item() for t in tensors]

    assert run_ranks(program, 2, "thread", timeout=60.0) == [[2.0] * 5] * 2


def test_close_does_not_wait_for_a_dead_rank() -> None:
    def program(comm: un.Communicator) -> float:
        comm.barrier()
        if comm.rank == 1:
            comm.monitored_barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        work = comm.all_reduce(torch.ones(2), async_op=True)
        comm.monitored_barrier()
        began = time.monotonic()
        comm.close()
        with pytest.raises(un.errors.PeerLostError):
            work.wait()
        return time.monotonic() - began

    took_s, _ = run_ranks(program, 2, "shm", timeout=20, on_failure="continue")
    assert took_s < 10
