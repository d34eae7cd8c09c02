"""Several writers at one path: one of them gets an error, and at every moment a complete checkpoint can be loaded."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_crasher import die_while_saving, forkserver
from pairwise import short

import unisono as un
from unisono.checkpoint import Checkpointer, CheckpointError
from unisono.checkpoint.storage import LocalStorage, storage_at
from unisono.testing import pool

LOCK = "manifest.json.lock"


def alone(comm: un.Communicator, folder: str, rounds: int) -> list[str]:
    """Save without the communicator, as often as asked for, at one time; return what went wrong."""
    wrong = []
    said: list[str] = []
    for number in range(rounds):
        comm.barrier()
        try:
            un.checkpoint.save(folder, {"w": torch.full((100,), float(comm.rank)), "number": number})
        except CheckpointError as error:
            said.append(str(error))
        comm.barrier()
        if comm.rank == 0:
            found = un.checkpoint.load(folder)
            if found["number"] != number or len(set(found["w"].tolist())) != 1:
                wrong.append(f"round {number}: {found}")
        comm.barrier()
    assert all("another save to this path is running" in text and "pass comm" in text for text in said)
    files = {path.name for path in Path(folder).iterdir()}
    if comm.rank == 0 and (len(files) != 2 or LOCK in files):
        wrong.append(f"remains: {files}")
    comm.barrier()
    return wrong


@short("backend, size", product(["thread", "shm", "gloo"], [2, 3]), [("thread", 3), ("gloo", 2)])
def test_ranks_that_save_alone_leave_a_whole_checkpoint(tmp_path: Path, backend: str, size: int) -> None:
    for wrong in pool(backend, 3).run(alone, str(tmp_path / "c"), 20, size=size):
        assert wrong == []


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["thread", "shm"])
def test_5000_rounds_of_two_writers(tmp_path: Path, backend: str) -> None:
    for wrong in pool(backend, 3, limit_s=550).run(alone, str(tmp_path / "c"), 5000, size=2):
        assert wrong == []


def blocked(storage: Any) -> Iterator[threading.Event]:
    """A save that waits in the middle, until its event is set."""
    started = threading.Event()
    going = threading.Event()

    def wait(done: int, total: int) -> None:
        started.set()
        assert going.wait(20)

    saving = threading.Thread(
        target=un.checkpoint.save, args=(storage, {"n": torch.ones(3)}), kwargs={"progress": wait}
    )
    saving.start()
    assert started.wait(20)
    yield going
    going.set()
    saving.join()


def test_second_writer_is_told_of_the_first(tmp_path: Path) -> None:
    for going in blocked(tmp_path):
        with pytest.raises(CheckpointError, match=f"running: of process {os.getpid()} on this host.*pass comm"):
            un.checkpoint.save(tmp_path, {"n": torch.zeros(3)})
        going.set()
    assert un.checkpoint.load(tmp_path)["n"].sum() == 3


def test_remote_storage_has_a_lock_too() -> None:
    path = "memory://two-writers/c"
    for going in blocked(path):
        with pytest.raises(CheckpointError, match="another save to this path is running"):
            un.checkpoint.save(path, {"n": torch.zeros(3)})
        going.set()
    un.checkpoint.save(path, {"n": torch.zeros(3)})
    assert not un.checkpoint.load(path)["n"].any()


def test_dead_writer_blocks_no_later_save(tmp_path: Path) -> None:
    dying = forkserver().Process(target=die_while_saving, args=(tmp_path,))
    un.checkpoint.save(tmp_path, {"n": torch.zeros(3)})
    dying.start()
    dying.join()
    assert dying.exitcode == 3
    assert (tmp_path / LOCK).exists()
    assert not un.checkpoint.load(tmp_path)["n"].any()
    un.checkpoint.save(tmp_path, {"n": torch.full((3,), 2.0)})
    assert un.checkpoint.load(tmp_path)["n"].sum() == 6
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(("age_s", "held"), [(60.0, True), (7200.0, False)])
def test_lock_of_another_host_counts_for_an_hour(tmp_path: Path, age_s: float, held: bool) -> None:
    card = {"id": "0" * 16, "pid": 1, "started": 5, "space": "00", "time": time.time() - age_s, "replaced": []}
    tmp_path.joinpath(LOCK).write_text(json.dumps(card))
    if held:
        with pytest.raises(CheckpointError, match=f"process 1 on another host.*delete {LOCK}"):
            un.checkpoint.save(tmp_path, {"n": 1})
        tmp_path.joinpath(LOCK).unlink()
    un.checkpoint.save(tmp_path, {"n": 1})
    assert un.checkpoint.load(tmp_path) == {"n": 1}


def test_lock_that_says_nothing_is_taken_over(tmp_path: Path) -> None:
    tmp_path.joinpath(LOCK).touch()
    un.checkpoint.save(tmp_path, {"n": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_writer_whose_lock_was_taken_does_not_publish(tmp_path: Path) -> None:
    def lose(done: int, total: int) -> None:
        tmp_path.joinpath(LOCK).write_text("{}")

    un.checkpoint.save(tmp_path, {"n": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="another save"):
        un.checkpoint.save(tmp_path, {"n": torch.ones(3)}, progress=lose)
    assert not un.checkpoint.load(tmp_path)["n"].any()


def test_files_of_others_stay(tmp_path: Path) -> None:
    un.checkpoint.save(tmp_path, {"n": torch.zeros(3)})
    other = tmp_path / "0123456789abcdef-00000.safetensors"
    other.touch()
    un.checkpoint.save(tmp_path, {"n": torch.ones(3)})
    assert other.exists()
    assert len(list(tmp_path.iterdir())) == 3


def test_file_that_vanishes_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the lock of another save does while this one lists the directory."""
    for name in ("a", "b", "c"):
        tmp_path.joinpath(name).touch()
    scandir = os.scandir

    def late(path: Any) -> Any:
        with scandir(path) as found:
            entries = list(found)
        tmp_path.joinpath("b").unlink()
        return nullcontext(entries)

    monkeypatch.setattr(os, "scandir", late)
    assert storage_at(tmp_path).sizes().keys() == {"a", "c"}


def test_storage_without_a_lock_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(LocalStorage, "lock")
    for number in range(3):
        un.checkpoint.save(storage_at(tmp_path), {"n": torch.full((2,), float(number))})
        assert len(list(tmp_path.iterdir())) == 2


def test_two_runs_in_one_directory(tmp_path: Path) -> None:
    first = Checkpointer(tmp_path, background=False, keep=2)
    second = Checkpointer(tmp_path, background=False, keep=2)
    first.save(10, {"n": 1})
    second.save(11, {"n": 2})
    with pytest.raises(CheckpointError, match=r"another Checkpointer has saved step-0000000011 .*directory of its own"):
        first.save(20, {"n": 1})
    assert Checkpointer(tmp_path).steps() == [10, 11]


def test_checkpoint_that_another_run_writes_stays(tmp_path: Path) -> None:
    for going in blocked(tmp_path / "step-0000000007"):
        Checkpointer(tmp_path, background=False).save(3, {"n": 1})
        going.set()
    assert Checkpointer(tmp_path).steps() == [3, 7]


@pytest.mark.parametrize("rounds", [300, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(600)])])
def test_reader_beside_a_writer_gets_the_old_or_the_new_checkpoint(tmp_path: Path, rounds: int) -> None:
    def state(number: int) -> dict[str, Any]:
        return {"a": torch.full((1000,), float(number)), "number": number, "b": torch.full((7,), float(number))}

    begun, done = threading.Event(), threading.Event()

    def write() -> None:
        number = 0
        while not done.is_set():
            number += 1
            un.checkpoint.save(tmp_path, state(number))
            begun.set()

    un.checkpoint.save(tmp_path, state(0))
    writer = threading.Thread(target=write)
    writer.start()
    try:
        # On a busy machine, all loads may be over before the first save is.
        assert begun.wait(30)
        latest = 0
        for number in range(rounds):
            found = un.checkpoint.load(tmp_path, state(-1) if number % 2 else None)
            assert found["number"] >= latest
            latest = found["number"]
            assert set(found["a"].tolist()) == set(found["b"].tolist()) == {float(latest)}
    finally:
        done.set()
        writer.join()
    assert latest > 0


def test_checkpointer_reads_beside_one_that_rotates(tmp_path: Path) -> None:
    begun, done = threading.Event(), threading.Event()

    def write() -> None:
        with Checkpointer(tmp_path, keep=1, background=False) as checkpointer:
            step = 0
            while not done.is_set():
                step += 1
                checkpointer.save(step, {"w": torch.full((100,), float(step))})
                begun.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert begun.wait(30)
        latest = 0
        for _ in range(200):
            state = {"w": torch.zeros(100)}
            found = Checkpointer(tmp_path).load(state)
            assert found is not None
            assert found >= latest
            assert set(state["w"].tolist()) == {float(found)}
            latest = found
    finally:
        done.set()
        writer.join()


def test_newest_is_found_though_all_that_were_listed_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that keeps one saves the next, and removes the one that a reader has just seen."""
    for step in (1, 2):
        un.checkpoint.save(tmp_path / f"step-{step}", {"step": step})
    real, listed = LocalStorage.children, list[int]()

    def children(self: LocalStorage) -> list[str]:
        listed.append(1)
        # At the first look, only the first one is there, and then it is gone.
        return ["gone"] if len(listed) == 1 else list(real(self))

    monkeypatch.setattr(LocalStorage, "children", children)
    assert un.checkpoint.latest(tmp_path) == str(tmp_path / "step-2")
