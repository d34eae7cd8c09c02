"""Many checkpoints of one run: the newest few stay, and the newest that is whole is found."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import unisono as un
from unisono.checkpoint import Checkpointer, CorruptError, NoCheckpointError, latest
from unisono.testing import run_ranks


@pytest.mark.parametrize("background", [False, True])
def test_old_checkpoints_are_removed(tmp_path: Path, background: bool) -> None:
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


def test_crash_leftovers_are_removed_and_other_files_stay(tmp_path: Path) -> None:
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


def test_damaged_checkpoint_is_not_skipped(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, background=False)
    for step in (1, 2):
        checkpointer.save(step, {"w": torch.full((9,), float(step))})
    file = next((tmp_path / "step-0000000002").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 4
    file.write_bytes(data)
    with pytest.raises(
        CorruptError, match=r"(?s)'w' has other bytes .*\nthe last good checkpoint beside it is .*step-0000000001"
    ):
        checkpointer.load({"w": torch.zeros(9)})
    assert checkpointer.load({"w": torch.zeros(9)}, step=1) == 1


def test_latest_is_by_time_and_skips_incomplete_ones(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        un.checkpoint.save(tmp_path / name, {"w": torch.ones(4)})
    assert un.checkpoint.latest(tmp_path) == str(tmp_path / "c")
    file = next((tmp_path / "c").glob("*.safetensors"))
    os.truncate(file, 100)
    assert un.checkpoint.latest(tmp_path) == str(tmp_path / "a")
    assert un.checkpoint.latest(tmp_path / "nowhere") is None


def test_working_directory_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpointer = Checkpointer("runs", keep=1, background=False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for step in (1, 2):
        checkpointer.save(step, {"step": step})
    assert checkpointer.steps() == [2]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["step-0000000002"]
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize("background", [False, True])
def test_new_checkpoint_is_kept_if_the_clock_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    now = time.time_ns()
    with Checkpointer(tmp_path, keep=2, background=background) as checkpointer:
        for step, instant in ((1, now), (2, now + 1), (3, now - 10**12)):
            monkeypatch.setattr("unisono.checkpoint.saver.time.time_ns", lambda instant=instant: instant)
            checkpointer.save(step, {"step": step})
            checkpointer.wait()
            # A resumed job continues from the last save.
            assert checkpointer.load({}) == step
        checkpointer.save(4, {})
    assert checkpointer.steps() == [3, 4]
    newest = latest(tmp_path)
    assert newest is not None
    assert Path(newest).name == "step-0000000004"


def test_step_numbers_are_integers(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="integer"):
        Checkpointer(tmp_path, keep=2.5)  # type: ignore[arg-type]  # wrong on purpose
    checkpointer = Checkpointer(tmp_path, background=False)
    for wrong in (2.0, "2"):
        for call in (checkpointer.save, checkpointer.step, lambda step, state: checkpointer.load(state, step=step)):
            with pytest.raises(TypeError, match="integer"):
                call(wrong, {})
    assert checkpointer.step(np.int64(3), {})
    assert checkpointer.load({}) == 3
