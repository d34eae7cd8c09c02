"""Saved and loaded by ranks: equal shares, the same errors everywhere, in the background, and old ones put away."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono as un
from unisono.checkpoint import Checkpointer, CheckpointError, CorruptError, NoCheckpointError, PerRank
from unisono.checkpoint.storage.local import LocalSink, LocalSource
from unisono.errors import MismatchError
from unisono.testing import pool, run_ranks


def state_of(seed: int) -> dict[str, Any]:
    torch_state = torch.Generator().manual_seed(seed)
    big = torch.randn(60_001, generator=torch_state)
    return {"big": big, "small": torch.arange(5) + seed, "none": torch.empty(0, 2), "step": seed}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["step"] == other["step"] and all(torch.equal(one[n], other[n]) for n in ("big", "small", "none"))


@pytest.mark.parametrize("saved", [1, 2, 5])
@pytest.mark.parametrize("loaded", [1, 3, 4])
def test_any_number_of_ranks_loads(tmp_path: Path, saved: int, loaded: int) -> None:
    run_ranks(lambda comm: un.checkpoint.save(tmp_path, state_of(1), comm), saved)
    sizes = sorted(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert len(sizes) == saved
    assert sizes[-1] - sizes[0] < 5000
    un.checkpoint.verify(tmp_path)

    def program(comm: un.Communicator) -> bool:
        fresh = un.checkpoint.load(tmp_path, None, comm)
        return same(fresh, state_of(1)) and same(un.checkpoint.load(tmp_path, state_of(2), comm), state_of(1))

    assert run_ranks(program, loaded) == [True] * loaded


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_processes(tmp_path: Path, backend: str) -> None:
    def program(comm: un.Communicator, path: str) -> bool:
        model = nn.Linear(400, 300)
        un.broadcast_parameters(model, comm)
        saving = un.checkpoint.async_save(path, {"model": model, "mine": PerRank(comm.rank)}, comm)
        before = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            model.weight += 1
        saving.wait()
        state = {"model": nn.Linear(400, 300), "mine": PerRank(None)}
        un.checkpoint.load(path, state, comm)
        equal = all(torch.equal(a, b) for a, b in zip(before, state["model"].parameters(), strict=True))
        return equal and state["mine"].obj == comm.rank

    assert pool(backend, 4).run(program, str(tmp_path), size=2) == [True, True]


@pytest.mark.parametrize("small", [0, 1 << 20])
def test_each_byte_is_read_once_on_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    monkeypatch.setattr("unisono.checkpoint.loading._SMALL", small)
    monkeypatch.setattr("unisono.checkpoint.reader.BLOCK", 1 << 16)
    read = dict[Path, int]()
    real, lock = LocalSource.read, threading.Lock()

    def counted(self: LocalSource, start: int, into: memoryview) -> None:
        with lock:
            read[self._path] = read.get(self._path, 0) + len(into)
        real(self, start, into)

    run_ranks(lambda comm: un.checkpoint.save(tmp_path, state_of(1), comm), 3)
    monkeypatch.setattr(LocalSource, "read", counted)
    run_ranks(lambda comm: un.checkpoint.load(tmp_path, state_of(2), comm), 4)
    assert read == {file: file.stat().st_size for file in tmp_path.iterdir()}


def test_each_host_reads_for_itself(tmp_path: Path) -> None:
    un.checkpoint.save(tmp_path, state_of(1))

    def program(comm: un.Communicator) -> bool:
        comm.hosts = ((0, 2, 3), (1,))
        return same(un.checkpoint.load(tmp_path, state_of(2), comm), state_of(1))

    assert run_ranks(program, 4) == [True] * 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s["big"].__setitem__(60_000, 0.5), "'big': rank 1 differs from ranks 0, 2"),
        (lambda s: s.update(step=7), r"'step': rank 1 differs from ranks 0, 2 \(1 on ranks 0, 2; 7 on rank 1\)"),
        (lambda s: s.update(more=torch.zeros(2)), "'more': rank 1 differs"),
        (lambda s: s.update(small=s["small"].int()), "'small': rank 1 differs"),
        (lambda s: s.pop("none"), "'none': rank 1 differs"),
    ],
)
def test_ranks_that_differ_are_named_and_nothing_is_written(tmp_path: Path, change: Any, said: str) -> None:
    def program(comm: un.Communicator) -> Path | None:
        state = state_of(1)
        if comm.rank == 1:
            change(state)
        for check in (un.checkpoint.assert_in_sync, lambda s, c: un.checkpoint.save(tmp_path / "x", s, c)):
            with pytest.raises(MismatchError, match=said):
                check(state, comm)
        with pytest.raises(MismatchError, match=said):
            un.checkpoint.async_save(tmp_path / "x", state, comm).wait()
        un.checkpoint.save(tmp_path / "y", {"mine": PerRank(state)}, comm)
        return (tmp_path / "x").exists()

    assert run_ranks(program, 3) == [False] * 3


def test_other_paths_are_noticed(tmp_path: Path) -> None:
    def program(comm: un.Communicator) -> None:
        un.checkpoint.save(tmp_path / str(comm.rank), {}, comm)

    errors = run_ranks(program, 2, on_failure="continue")
    assert all(isinstance(error, MismatchError) and "(the path)" in str(error) for error in errors)


def test_sync_makes_newcomers_equal() -> None:
    def program(comm: un.Communicator) -> list[Any]:
        torch.manual_seed(1)
        model = nn.Linear(300, 20)
        optimizer = torch.optim.Adam(model.parameters())
        state = {"model": model, "optimizer": optimizer, "step": comm.rank, "mine": PerRank(comm.rank)}
        if comm.rank == 2:
            with torch.no_grad():
                model.weight += 1
            model(torch.ones(1, 300)).sum().backward()
            optimizer.step()
        comm.barrier()
        un.checkpoint.sync(state, comm, src=2)
        un.checkpoint.assert_in_sync(state, comm)
        moments = optimizer.state_dict()["state"][0]["exp_avg"]
        return [state["step"], state["mine"].obj, model.weight.sum().item(), moments.sum().item()]

    found = run_ranks(program, 3)
    assert [one[:2] for one in found] == [[2, 0], [2, 1], [2, 2]]
    assert found[0][2:] == found[1][2:] == found[2][2:]
    assert found[0][3] != 0


def test_sync_of_another_model_is_refused_everywhere() -> None:
    def program(comm: un.Communicator) -> None:
        un.checkpoint.sync({"net": nn.Linear(2, 2 + comm.rank)}, comm)

    errors = run_ranks(program, 2, on_failure="continue")
    assert all("'net.weight' has shape (2, 2) in it, (3, 2) here" in str(error) for error in errors)


# -- in the background -------------------------------------------------------------------------


def test_async_save_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, real = threading.Event(), LocalSink.write

    def held(self: LocalSink, data: memoryview) -> None:
        assert gate.wait(30)
        real(self, data)

    monkeypatch.setattr(LocalSink, "write", held)

    def program(comm: un.Communicator) -> bool:
        state = {"big": torch.zeros(50_000), "turned": torch.zeros(30, 20).t(), "step": 1}
        first = un.checkpoint.async_save(tmp_path, state, comm)
        assert not first.done()
        with pytest.raises(un.errors.CommTimeoutError, match="still under way after 0 s"):
            first.wait(0)
        state["big"] += 1
        state["turned"] += 1
        state["step"] = 2
        comm.barrier()
        gate.set()
        second = un.checkpoint.async_save(tmp_path, state, comm)
        assert first.done()
        second.wait()
        assert second.exception() is None
        loaded = un.checkpoint.load(tmp_path, None, comm)
        return bool((loaded["big"] == 1).all() and (loaded["turned"] == 1).all()) and loaded["step"] == 2

    assert run_ranks(program, 2) == [True, True]


def test_async_save_saves_what_there_was_when_it_was_called(tmp_path: Path) -> None:
    def program(comm: un.Communicator) -> bool:
        state = {"big": torch.zeros(50_000), "turned": torch.zeros(30, 20).t(), "step": 1}
        saving = un.checkpoint.async_save(tmp_path, state, comm)
        state["big"] += 1
        state["turned"] += 1
        saving.wait()
        loaded = un.checkpoint.load(tmp_path, None, comm)
        return not loaded["big"].any() and not loaded["turned"].any()

    assert run_ranks(program, 2) == [True, True]
    assert run_ranks(program, 1) == [True]


def test_errors_in_the_background_are_raised_by_wait(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def program(comm: un.Communicator) -> bool:
        saving = un.checkpoint.async_save(tmp_path / "file" / "x", {}, comm)
        assert isinstance(saving.exception(), CheckpointError)
        with pytest.raises(CheckpointError, match=r"File exists|Not a directory"):
            saving.wait()
        un.checkpoint.async_save(tmp_path / "good", {}, comm).wait()
        saving = un.checkpoint.async_save(tmp_path / "bad", {"x": object()} if comm.rank else {}, comm)
        return isinstance(saving.exception(), TypeError)

    assert run_ranks(program, 2) == [True, True]


def test_a_tensor_that_changes_while_it_is_saved_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.zeros(20_000)}
    real = LocalSink.__init__

    def change(self: LocalSink, path: Path) -> None:
        state["w"][-1] = 1.0
        state["w"][0] = 1.0
        real(self, path)

    monkeypatch.setattr(LocalSink, "__init__", change)
    errors = run_ranks(lambda comm: un.checkpoint.save(tmp_path, state, comm), 2, on_failure="continue")
    assert all(isinstance(error, CheckpointError) and "it was changed while" in str(error) for error in errors)
    assert not list(tmp_path.iterdir())


# -- many of a run -----------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_old_ones_are_put_away(tmp_path: Path, background: bool) -> None:
    def program(comm: un.Communicator) -> list[int | None]:
        state = {"w": torch.zeros(10), "step": 0}
        with Checkpointer(tmp_path, comm, keep=2, every=5, background=background) as checkpointer:
            found = [checkpointer.load(state)]
            for step in range(1, 24):
                state["w"] += 1
                state["step"] = step
                assert checkpointer.step(step, state) == (step % 5 == 0)
            found.append(checkpointer.load(state))
            assert state["w"][0] == state["step"] == 20
            found.append(checkpointer.load(state, step=15))
        return [*found, *checkpointer.steps()]

    assert run_ranks(program, 2) == [[None, 20, 15, 15, 20]] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000000015", "step-0000000020"]


def test_what_crashes_left_is_put_away_and_others_files_stay(tmp_path: Path) -> None:
    (tmp_path / "step-0000000003").mkdir()
    (tmp_path / "step-0000000003" / ("0" * 16 + "-00000.safetensors")).write_text("half")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "read.me").write_text("mine")
    checkpointer = Checkpointer(tmp_path, keep=1, background=False)
    checkpointer.save(7, {"w": torch.ones(2)})
    checkpointer.save(8, {"w": torch.ones(2)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-0000000008"]
    with pytest.raises(ValueError, match="keep=0"):
        Checkpointer(tmp_path, keep=0)
    with pytest.raises(NoCheckpointError, match=r"the last good checkpoint beside it is .*0008"):
        checkpointer.load({}, step=9)


def test_a_damaged_one_is_not_passed_over(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, background=False)
    for step in (1, 2):
        checkpointer.save(step, {"w": torch.full((9,), float(step))})
    file = next((tmp_path / "step-0000000002").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 4
    file.write_bytes(data)
    with pytest.raises(
        CorruptError, match=r"'w' has other bytes .* the last good checkpoint beside it is .*step-0000000001"
    ):
        checkpointer.load({"w": torch.zeros(9)})
    assert checkpointer.load({"w": torch.zeros(9)}, step=1) == 1


def test_latest_is_by_time_and_passes_over_what_is_not_whole(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        un.checkpoint.save(tmp_path / name, {"w": torch.ones(4)})
    assert un.checkpoint.latest(tmp_path) == str(tmp_path / "c")
    file = next((tmp_path / "c").glob("*.safetensors"))
    os.truncate(file, 100)
    assert un.checkpoint.latest(tmp_path) == str(tmp_path / "a")
    assert un.checkpoint.latest(tmp_path / "nowhere") is None


def test_progress_and_extra(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    state = {"w": torch.zeros(1000)}
    un.checkpoint.save(
        tmp_path, state, extra={"note": "first"}, progress=lambda done, total: told.append((done, total))
    )
    assert told[-1] == (4000, 4000)
    assert un.checkpoint.open(tmp_path).manifest.extra["note"] == "first"
    for read in (
        lambda tell: un.checkpoint.load(tmp_path, progress=tell),
        lambda tell: un.checkpoint.verify(tmp_path, progress=tell),
    ):
        told.clear()
        read(lambda done, total: told.append((done, total)))
        assert told[-1][0] == told[-1][1] > 4000


def test_a_reader_meets_a_save_over_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    un.checkpoint.save(tmp_path, state_of(1))
    real, times = LocalSource.__init__, []

    def between(self: LocalSource, path: Path) -> None:
        if path.suffix == ".safetensors" and not times:
            times.append(path)
            monkeypatch.setattr(LocalSource, "__init__", real)
            un.checkpoint.save(tmp_path, state_of(2))
        real(self, path)

    monkeypatch.setattr(LocalSource, "__init__", between)
    assert same(un.checkpoint.load(tmp_path, state_of(0)), state_of(2))
    assert times


def test_memory_of_other_kinds(tmp_path: Path) -> None:
    del tmp_path
    path = "memory://runs/7/last"
    run_ranks(lambda comm: un.checkpoint.save(path, state_of(1), comm), 2)
    run_ranks(lambda comm: un.checkpoint.save(path, state_of(3), comm), 2)
    assert same(un.checkpoint.load(path), state_of(3))
    assert un.checkpoint.latest("memory://runs/7") == path
    with un.checkpoint.open(path) as archive:
        assert torch.equal(archive["big"], state_of(3)["big"])
    un.checkpoint.verify(path)
    with Checkpointer("memory://runs/8", keep=1, background=False) as checkpointer:
        checkpointer.save(1, state_of(1))
        checkpointer.save(2, state_of(2))
        assert checkpointer.steps() == [2]
    with pytest.raises(NoCheckpointError, match="the last good checkpoint beside it is memory://runs/7/last"):
        un.checkpoint.load("memory://runs/7/first")
