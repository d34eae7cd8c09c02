"""Ends of simulated ranks: by a deadlock, which is reported immediately, killed, frozen, or by an error."""

from __future__ import annotations

import importlib
import queue
import threading
import time
from pathlib import Path

import pytest
import torch

import unisono as un
from unisono.errors import CommTimeoutError, DeadlockError, PeerLostError
from unisono.simulation import TaskScheduler
from unisono.testing import KilledError, RankFaults


# -- deadlock --------------------------------------------------------------------------------------
def test_deadlock_names_every_rank() -> None:
    def program(comm: un.Communicator) -> None:
        if comm.rank == 2:
            comm.all_reduce(torch.ones(1))
        else:
            comm.recv(torch.zeros(1), 1 - comm.rank)

    run = un.simulate(program, 3, on_failure="continue", seed=5)
    assert run.time_s < 1.0
    for rank, error in enumerate(run.results):
        assert isinstance(error, DeadlockError), error
        assert error.rank == rank
        said = str(error)
        assert "rank 0 waits in recv at test_scheduler_failures.py:" in said
        assert "for 4 B from rank 1" in said
        assert "rank 1 waits in recv at test_scheduler_failures.py:" in said
        assert "for 4 B from rank 0" in said
        assert "rank 2 waits in all_reduce at test_scheduler_failures.py:" in said
        assert "for ranks 0, 1 to join" in said
        assert any("seed 5" in note for note in error.__notes__)


def test_unreleased_lock_is_a_deadlock() -> None:
    def program(comm: un.Communicator) -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    said = r"rank 0 waits at test_scheduler_failures.py:.* for something in its own process"
    with pytest.raises(DeadlockError, match=said):
        un.simulate(program, 1)


def test_deadlock_names_the_line_of_a_program_in_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "installed_trainer.py").write_text(
        "import torch\n\ndef train(comm):\n    comm.recv(torch.zeros(1), 1 - comm.rank)\n"
    )
    monkeypatch.syspath_prepend(packages)
    program = importlib.import_module("installed_trainer").train
    with pytest.raises(DeadlockError, match=r"rank 0 waits in recv at installed_trainer.py:4 for 4 B from rank 1"):
        un.simulate(program, 2)


def test_program_may_continue_after_a_deadlock() -> None:
    def program(comm: un.Communicator) -> str:
        part = comm.dup()
        try:
            part.recv(torch.zeros(1), 1 - comm.rank)
        except DeadlockError:
            comm.barrier()
        return "went on"

    assert un.simulate(program, 2).results == ["went on"] * 2


# -- ends ------------------------------------------------------------------------------------------
def lose_threads(comm: un.Communicator) -> None:
    threading.Thread(target=threading.Event().wait).start()
    threading.Thread(target=lambda: queue.SimpleQueue().get(), daemon=True).start()
    if comm.rank == 1:
        raise KeyError("mine")


@pytest.mark.parametrize("backend", ["sim", "thread"])
def test_no_thread_remains(backend: str) -> None:
    before = set(threading.enumerate())
    with pytest.raises(KeyError, match="mine"):
        un.simulate(lose_threads, 3, backend=backend)
    assert set(threading.enumerate()) <= before


def test_rank_running_after_a_failure_is_ended() -> None:
    def program(comm: un.Communicator) -> None:
        if comm.rank == 1:
            raise KeyError("mine")
        time.sleep(1e6)

    with pytest.raises(KeyError, match="mine"):
        un.simulate(program, 2)
    run = un.simulate(program, 2, on_failure="continue")
    assert run.results[0] is None
    assert run.time_s > 1e6


def test_silently_killed_rank_is_named() -> None:
    reached: list[str] = []

    def program(comm: un.Communicator) -> None:
        try:
            for _ in range(5):
                comm.all_reduce(torch.ones(1))
        except KilledError:
            with pytest.raises(un.CommError):
                comm.send(torch.ones(1), 0)
            reached.append("nothing")
            raise

    run = un.simulate(program, 3, on_failure="continue", faults={"on_ranks": RankFaults(kill_at=3, ranks=[1])})
    assert isinstance(run.results[1], KilledError)
    for error in (run.results[0], run.results[2]):
        assert isinstance(error, PeerLostError)
        assert error.peer == 1
        assert "its process ended without closing" in str(error)
    assert reached == ["nothing"]


def test_frozen_rank_is_named() -> None:
    faults = {"on_ranks": RankFaults(freeze_at=2, ranks=[1])}

    def program(comm: un.Communicator) -> None:
        for _ in range(3):
            comm.all_reduce(torch.ones(1))

    run = un.simulate(program, 3, on_failure="continue", faults=faults)
    assert run.time_s < 10.0
    for error in run.results:
        assert isinstance(error, DeadlockError)
        assert "rank 1 waits in all_reduce at test_scheduler_failures.py" in str(error)
        assert "it is frozen, as configured" in str(error)


def test_real_blocking_call_is_detected() -> None:
    blocked, free = threading.Event(), threading.Event()
    scheduler = TaskScheduler(0, 10.0, stuck_s=0.1)

    def wait_for_real() -> None:
        # Made outside, so it is none of the simulation's.
        blocked.set()
        free.wait()

    timer = threading.Timer(0.5, free.set)
    timer.start()
    scheduler.start(wait_for_real, "task", 0, main=True)
    with pytest.raises(CommTimeoutError, match=r"task has blocked all other tasks for 0 s(.|\n)*wait_for_real"):
        scheduler.run()
    assert blocked.is_set()
    timer.join()
