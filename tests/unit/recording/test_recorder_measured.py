"""Programs whose ranks exchange times, facts of their hosts, or secrets are replayed, with the values of that run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_programs import apart, equal, model_of

import unisono as un
from unisono.errors import MismatchError, UnavailableError
from unisono.testing import pool
from unisono.utils import flatten

RANKS = 3


def metrics(comm: un.Communicator, folder: Path) -> Any:
    found = []
    for _ in range(2):
        for _ in range(25):
            comm.barrier()
        found.append(comm.metrics())
    return found


def throughput(comm: un.Communicator, folder: Path) -> Any:
    meter = un.utils.Throughput(comm)
    rates = []
    for samples in range(3):
        meter.step(samples)
        rates.append(meter.read())
    return rates


def trace(comm: un.Communicator, folder: Path) -> Any:
    with un.trace(folder / "run.json", comm):
        comm.all_reduce(torch.ones(3))
        comm.sendrecv(torch.ones(1), (comm.rank + 1) % comm.size, torch.zeros(1), (comm.rank - 1) % comm.size)
    return comm.rank


def tune(comm: un.Communicator, folder: Path) -> Any:
    hash_ = comm.tune(seconds=0.05).hash
    comm.all_reduce(torch.ones(100), algorithm="auto")
    return hash_


def auto(comm: un.Communicator, folder: Path) -> Any:
    total = torch.ones(100) * comm.rank
    comm.all_reduce(total, algorithm="auto")
    comm.split(0).all_reduce(total, algorithm="auto")
    return comm.plan("all_reduce", 400).algorithm, total


def save(comm: un.Communicator, folder: Path) -> Any:
    state = {"w": torch.full((4,), 1.5), "own": un.checkpoint.PerRank(comm.rank)}
    un.checkpoint.save(folder / "saved", state, comm)
    un.checkpoint.async_save(folder / "saved later", state, comm).wait()
    return state["w"]


def checkpointer(comm: un.Communicator, folder: Path) -> Any:
    state = {"w": torch.full((4,), 1.5)}
    with un.checkpoint.Checkpointer(folder / "run", comm, keep=1, every=2) as saver:
        return [saver.step(step, state) for step in range(1, 7)]


def averager(comm: un.Communicator, folder: Path) -> Any:
    model = model_of().eval()
    un.GradientAverager(model, comm)
    model(torch.ones(2, 6)).sum().backward()
    return [p.grad for p in model.parameters()]


MEASURING = {each.__name__: each for each in (metrics, throughput, trace, tune, auto, save, checkpointer, averager)}


def measuring(comm: un.Communicator, folder: Path, name: str) -> Any:
    with un.record(folder / "recorded", comm):
        found = MEASURING[name](comm, folder)
        total = torch.ones(2) * comm.rank
        comm.all_reduce(total)
        return found, total


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def check(backend: str, folder: Path, name: str) -> None:
    results = pool(backend, RANKS, timeout=60.0).run(apart, measuring, folder, name)
    for rank, result in enumerate(results):
        assert equal(un.replay(folder / "recorded", rank, measuring, (folder, name)), result), f"rank {rank}"


@pytest.mark.parametrize("name", MEASURING)
def test_measured_values_are_those_of_the_recording(name: str, tmp_path: Path) -> None:
    check("thread", tmp_path, name)


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["shm", "tcp", "gloo"])
@pytest.mark.parametrize("name", MEASURING)
def test_measured_values_of_processes_are_those_of_the_recording(backend: str, name: str, tmp_path: Path) -> None:
    check(backend, tmp_path, name)


@pytest.mark.soak
def test_another_host_has_other_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where messages are sent while others fill, the size of the first one depends on them."""
    results = un.launch(measuring, 2, "gloo", (tmp_path, "averager"), check="off", timeout=60.0)
    monkeypatch.setattr(flatten, "cores", lambda: 1000)
    assert equal(un.replay(tmp_path / "recorded", 1, measuring, (tmp_path, "averager")), results[1])


@pytest.mark.parametrize("name", ["save", "checkpointer", "tune"])
def test_replay_writes_nothing(name: str, tmp_path: Path, cache: Path) -> None:
    pool("thread", RANKS, timeout=60.0).run(apart, measuring, tmp_path, name)
    there = {each.name for each in tmp_path.iterdir()} - {"recorded"}
    for each in there:
        shutil.rmtree(tmp_path / each)
    for rank in range(RANKS):
        un.replay(tmp_path / "recorded", rank, measuring, (tmp_path, name))
    assert [each.name for each in tmp_path.iterdir()] == ["recorded"]


def unequal(comm: un.Communicator, folder: Path, factor: float) -> Any:
    """Times are not compared; what the program computes is."""
    with un.record(folder, comm):
        comm.metrics()
        total = torch.ones(2) * factor
        comm.all_reduce(total)
        return un.utils.Throughput(comm).read().samples


def test_what_the_program_sends_is_compared_between_measured_values(tmp_path: Path) -> None:
    pool("thread", RANKS, timeout=60.0).run(apart, unequal, tmp_path, 1.0)
    assert un.replay(tmp_path, 1, unequal, (tmp_path, 1.0)) == 0
    with pytest.raises(MismatchError, match=r"all_reduce #\d+ of .*: this rank sends other bytes"):
        un.replay(tmp_path, 1, unequal, (tmp_path, 2.0))


def test_groups_of_torch_are_refused_in_a_replay(tmp_path: Path) -> None:
    def program(comm: un.Communicator, initialize: Callable[[], object]) -> None:
        with un.record(tmp_path / "recorded", comm):
            comm.barrier()
            initialize()

    pool("thread", 2, timeout=60.0).run(apart, program, lambda: None)
    before = torch.distributed.init_process_group
    with pytest.raises(UnavailableError, match=r"a replay has no other ranks that could join a group of torch"):
        un.replay(tmp_path / "recorded", 0, program, (lambda: torch.distributed.init_process_group("unisono"),))
    assert torch.distributed.init_process_group is before
