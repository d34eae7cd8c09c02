"""Trainings of every kind stop at one step, and go on from there as if they had never been stopped."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono as un
from unisono.checkpoint import saver

SAVED, UNSAVED = 75, 74
STEPS = 6


def made(kind: str, comm: un.Communicator) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model, and what is saved: the model, or what shards it, and "optimizer", "local" or "averager"."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    # Ranks that are threads share torch's own generator.
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.data = torch.rand(parameter.shape, dtype=torch.float64, generator=generator) - 0.5
    adam: dict[str, Any] = {"optimizer_class": torch.optim.Adam, "lr": 0.1, "elementwise": True}
    if kind in ("ZeRO-3", "mesh"):
        mesh = (comm.split(comm.rank % 2), comm.split(comm.rank // 2)) if kind == "mesh" else None
        sharded = un.sharding.ShardedModel(model, comm, mesh=mesh)
        return model, {"model": sharded, "optimizer": sharded.optimizer(**adam)}
    if kind == "ZeRO-2":
        optimizer: Any = un.sharding.ShardedOptimizer(model=model, comm=comm, shard_gradients=True, **adam)
        return model, {"model": model, "optimizer": optimizer}
    if kind in ("local SGD", "DiLoCo"):
        local = {"local SGD": un.gradients.LocalSGD, "DiLoCo": un.gradients.DiLoCo}[kind](model, comm, every=2)
        return model, {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "local": local}
    averager = un.GradientAverager(model, comm)
    if kind == "ZeRO-1":
        optimizer = un.sharding.ShardedOptimizer(model=model, comm=comm, **adam)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, {"model": model, "optimizer": optimizer, "averager": averager}


def trained(comm: un.Communicator, kind: str, folder: str, asks_at: int | None) -> tuple[int, int, str]:
    """Train on from the last checkpoint. Return where it has stopped, the exit status, and the weights."""
    model, state = made(kind, comm)

    def backward(part: int) -> None:
        inputs = torch.full((2, 3), (comm.rank + 1) * 0.1 + done + part, dtype=torch.float64)
        model(inputs).square().mean().backward()

    with un.checkpoint.Checkpointer(folder, comm, every=100, save_on_stop=True) as checkpointer:
        done = checkpointer.load(state) or 0
        while done < STEPS:
            if asks_at == done and comm.rank == comm.size - 1:
                comm.request_stop(kind)
            state["optimizer"].zero_grad()
            if kind == "accumulation":
                with state["averager"].no_sync():
                    backward(1)
            backward(0)
            state["optimizer"].step()
            done += 1
            if "local" not in state or state["local"].step():
                checkpointer.step(done, state)
                if comm.stop_requested():
                    break
        if comm.stop_reason is None:
            checkpointer.save(done, state)
    whole = un.checkpoint.load(Path(folder) / f"step-{done:010d}")["model"]
    return done, un.stop.exit_status(comm), str({name: value.tolist() for name, value in whole.items()})


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("plain", 1),
        ("accumulation", 2),
        ("local SGD", 2),
        pytest.param("DiLoCo", 2, marks=pytest.mark.soak),
        pytest.param("ZeRO-1", 2, marks=pytest.mark.soak),
        pytest.param("ZeRO-2", 2, marks=pytest.mark.soak),
        ("ZeRO-3", 2),
        pytest.param("mesh", 4, marks=pytest.mark.soak),
    ],
)
def test_a_stopped_training_ends_as_one_that_was_not(kind: str, size: int, tmp_path: Path) -> None:
    def run(folder: str, asks_at: int | None) -> tuple[int, int, str]:
        found = un.launch(trained, size, "thread", args=(kind, str(tmp_path / folder), asks_at), timeout=20)
        assert found == [found[0]] * size
        return found[0]

    expected = run("whole", None)
    assert expected[:2] == (STEPS, 0)
    for asks_at in (0, 3):
        done, status, _ = run("stopped", asks_at)
        assert asks_at < done < STEPS
        assert status == SAVED
    assert run("stopped", None) == expected


# -- what happens meanwhile ------------------------------------------------------------------------
def saving(comm: un.Communicator, folder: str, writing: threading.Event) -> tuple[int, int, list[int]]:
    """Stop while a background save waits for its storage."""
    with un.checkpoint.Checkpointer(folder, comm, every=100, save_on_stop=True) as checkpointer:
        for step in un.stop.batches(comm, range(1, 100)):
            if step == 2:
                checkpointer.save(step, {"step": step})
            else:
                checkpointer.step(step, {"step": step})
            if step == 3 and comm.rank == 1:
                comm.request_stop("while a save is in progress")
            comm.barrier()
        before = checkpointer.steps()
        comm.barrier()
        writing.set()
    return len(before), un.stop.exit_status(comm), checkpointer.steps()


def test_a_stop_waits_for_no_save_and_its_save_for_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = threading.Event()
    write = saver._write

    def slow(*args: Any) -> Any:
        assert writing.wait(30)
        return write(*args)

    monkeypatch.setattr(saver, "_write", slow)
    for before, status, steps in un.launch(saving, 2, "thread", args=(str(tmp_path), writing), timeout=20):
        assert before == 0
        assert status == SAVED
        assert len(steps) == 2
        assert steps[0] == 2


def killed(comm: un.Communicator, folder: str, when: str) -> tuple[str, int]:
    """Rank 1 dies after the request: before the next step, while it saves, or while it saves the step of the stop."""
    write = saver._write

    def die(*args: Any) -> Any:
        if saves.pop():
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*args)

    saves = {"step": [], "save": [True, False], "stop": [True, False, False]}[when]
    if comm.rank == 1 and saves:
        saver._write = die
    try:
        with un.checkpoint.Checkpointer(folder, comm, every=2, save_on_stop=True) as checkpointer:
            for step in un.stop.batches(comm, range(1, 100)):
                comm.barrier()
                checkpointer.step(step, {"step": step})
                if step == 4 and comm.rank == 1:
                    if when == "save":
                        checkpointer.wait()
                    comm.request_stop(f"before rank 1 dies in a {when}")
                    if when == "step":
                        os.kill(os.getpid(), signal.SIGKILL)
    except un.CommError as error:
        return type(error).__name__, un.stop.exit_status(comm)
    return "no error", un.stop.exit_status(comm)


@pytest.mark.soak
@pytest.mark.parametrize(("when", "last"), [("step", (2, 4)), ("save", (2,)), ("stop", (4,))])
def test_a_rank_that_dies_after_the_request_leaves_a_whole_checkpoint(
    when: str, last: tuple[int, ...], tmp_path: Path
) -> None:
    found = un.launch(killed, 3, "shm", args=(str(tmp_path), when), on_failure="continue", timeout=20)
    for name, status in (found[0], found[2]):
        assert name in ("PeerLostError", "CheckpointError")
        assert status != SAVED
    checkpointer = un.checkpoint.Checkpointer(tmp_path)
    assert checkpointer.steps()[-1] in last
    assert checkpointer.load({"step": 0}) in last


def recovering(comm: un.Communicator, folder: str) -> tuple[int, int, str | None, int]:
    """Rank 2 requests a stop and fails within the step; the others recover, and stop after a later one."""
    model, state = made("plain", comm)
    training = un.elastic.Recovery(comm, **state)
    with un.checkpoint.Checkpointer(folder, comm, every=100, save_on_stop=True) as checkpointer:
        while training.step < 50:
            try:
                if comm.stop_requested():
                    break
                if comm.rank == 2 and training.step == 3:
                    comm.request_stop("before a rank fails")
                    raise KeyError("this rank is gone")
                state["optimizer"].zero_grad()
                model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
                state["optimizer"].step()
                training.commit()
                checkpointer.step(training.step, {**state, "step": training.step})
            except un.CommError:
                training.recover()
    return training.comm.size, training.step, comm.stop_reason, un.stop.exit_status(comm)


def test_a_request_holds_after_a_recovery(tmp_path: Path) -> None:
    found = un.launch(recovering, 3, "thread", args=(str(tmp_path),), on_failure="continue", timeout=20)
    assert found[0] == found[1] == (2, found[0][1], "before a rank fails", SAVED)
    assert 3 <= found[0][1] < 10
    assert un.checkpoint.Checkpointer(tmp_path).steps() == [found[0][1]]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_resumed_training_that_stops_at_once_is_saved(steps: int, tmp_path: Path) -> None:
    un.checkpoint.Checkpointer(tmp_path, background=False).save(4, {"step": 4})
    with un.init() as comm, un.checkpoint.Checkpointer(tmp_path, comm, every=100) as checkpointer:
        if steps == 0:
            comm.request_stop()
        assert checkpointer.load({"step": 0}) == 4
        for _ in un.stop.batches(comm, range(5)):
            comm.request_stop()
    assert un.stop.exit_status(comm) == (SAVED if steps == 0 else UNSAVED)
