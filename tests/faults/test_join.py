"""New ranks join the survivors of a group, and receive the state of the training."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from recovery_helpers import launched, soaked, total
from waiting import run_concurrently, wait_until

import unisono as un
from unisono.errors import CommError


def told_pid(folder: Path) -> int:
    """Wait until a rank of the job has told its process."""
    file = folder / "pid"
    assert wait_until(file.exists)
    return int(file.read_text())


def tell_pid(folder: str) -> None:
    written = Path(folder) / "pid.written"
    written.write_text(str(os.getpid()))
    written.rename(written.with_suffix(""))


def joins(comm: Any, pid: int) -> tuple[int, int, str, float]:
    """A process of another job becomes a rank of this one."""
    with un.join(pid=pid, timeout=20) as joined:
        return joined.rank, joined.size, joined.backend, total(joined)


@pytest.mark.parametrize("backend", ["tcp", soaked("shm"), soaked("gloo"), soaked("shm+tcp")])
def test_new_rank_replaces_a_dead_one(tmp_path: Path, backend: str) -> None:
    def program(comm: Any, folder: str) -> tuple[int, int, float]:
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if comm.rank == 0:
            tell_pid(folder)
        try:
            comm.barrier()
        except CommError:
            comm = comm.rebuild(grow=1, timeout=30)
        return comm.rank, comm.size, total(comm)

    ends, newcomer = run_concurrently(
        lambda: launched(program, 3, backend, str(tmp_path)), lambda: launched(joins, 1, "shm", told_pid(tmp_path))
    )
    assert (ends[0], ends[2]) == ((0, 3, 3.0), (1, 3, 3.0))
    assert newcomer == [(2, 3, backend, 3.0)]


def test_join_without_a_group() -> None:
    with pytest.raises(ValueError, match="either an init_method"):
        un.join()
    with pytest.raises(ValueError, match="unknown init_method"):
        un.join("udp://x:1")
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other,
        pytest.raises(CommError, match="is in no unisono job"),
    ):
        un.join(pid=other.pid)


def trains(comm: Any, pid: int) -> tuple[int, float, list[int]]:
    """A process of another job comes to a training."""
    joined = un.join(pid=pid, timeout=30)
    model = torch.nn.Linear(1, 1)
    sampler = un.data.PartitionSampler(range(12), num_replicas=1, rank=0)
    training = un.elastic.Recovery(joined, model=model, sampler=sampler)
    training.join()
    try:
        return training.step, model.weight.item(), sorted(sampler)
    finally:
        training.comm.close()


def test_new_rank_receives_model_and_remaining_samples(tmp_path: Path) -> None:
    def program(comm: Any, folder: str) -> list[int]:
        model = torch.nn.Linear(1, 1)
        with torch.no_grad():
            model.weight.fill_(7.0)
        sampler = un.data.PartitionSampler(range(12), comm)
        training = un.elastic.Recovery(comm, model=model, sampler=sampler)
        used = list(sampler)[:3]
        training.commit(3)
        if comm.rank == 0:
            tell_pid(folder)
        training.recover(grow=1, timeout=30)
        return used + sorted(sampler)

    (first, second), ((step, weight, samples),) = run_concurrently(
        lambda: launched(program, 2, "shm", str(tmp_path)), lambda: launched(trains, 1, "shm", told_pid(tmp_path))
    )
    assert (step, weight) == (1, 7.0)
    assert sorted([*first, *second, *samples]) == list(range(12))


def stopped(comm: Any) -> tuple[int, str | None]:
    steps = 0
    for _ in un.stop.batches(comm, range(1000)):
        comm.barrier()
        steps += 1
    return steps, comm.stop_reason


@pytest.mark.soak
@pytest.mark.parametrize("asks", ["before", "after"])
def test_a_stop_requested_while_a_rank_joins_is_for_the_newcomer_too(tmp_path: Path, asks: str) -> None:
    def grown(comm: Any, folder: str) -> tuple[int, str | None]:
        if comm.rank == 0:
            tell_pid(folder)
        if comm.rank == 1 and asks == "before":
            comm.request_stop("while a rank joins")
        comm = comm.rebuild(grow=1, timeout=30)
        if comm.rank == 1 and asks == "after":
            comm.request_stop("while a rank joins")
        return stopped(comm)

    def joining(comm: Any, pid: int) -> tuple[int, str | None]:
        with un.join(pid=pid, timeout=20) as joined:
            return stopped(joined)

    ends, newcomer = run_concurrently(
        lambda: launched(grown, 2, "tcp", str(tmp_path)), lambda: launched(joining, 1, "shm", told_pid(tmp_path))
    )
    assert ends[0][1] == "while a rank joins"
    assert ends == [ends[0]] * 2
    assert newcomer == [ends[0]]
