"""Saved in the background: what there was, one after another, and before the communicator is closed."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from itertools import count, product
from pathlib import Path

import pytest
import torch
from pairwise import short
from waiting import repeated

import unisono as un
from unisono.checkpoint import CheckpointError, PerRank
from unisono.checkpoint.storage import LocalSink
from unisono.testing import pool, run_ranks
from unisono.tools.cli import main


def test_async_save_keeps_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, real = threading.Event(), LocalSink.write

    def held(self: LocalSink, data: memoryview) -> None:
        assert gate.wait(30)
        real(self, data)

    monkeypatch.setattr(LocalSink, "write", held)

    def program(comm: un.Communicator) -> bool:
        state = {"big": torch.zeros(50_000), "turned": torch.zeros(30, 20).t(), "step": 1}
        first = un.checkpoint.async_save(tmp_path, state, comm)
        assert not first.done()
        with pytest.raises(un.errors.CommTimeoutError, match="still running after 0 s"):
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


def test_async_save_saves_a_snapshot(tmp_path: Path) -> None:
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


def test_background_errors_are_raised_by_wait(tmp_path: Path) -> None:
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


def test_tensor_changed_during_a_save_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("which", ["whole", "part", "rebuilt"])
def test_close_waits_for_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    """This includes saves of a subgroup, which is closed with its parent, and inherited saves."""
    closing, real = threading.Event(), LocalSink.write

    def held(self: LocalSink, data: memoryview) -> None:
        assert closing.wait(30)
        real(self, data)

    monkeypatch.setattr(LocalSink, "write", held)
    done: list[bool] = []

    def program(comm: un.Communicator) -> None:
        used = comm.split(0) if which == "part" else comm
        assert used is not None
        saving = un.checkpoint.async_save(tmp_path, {"mine": PerRank(torch.ones(9))}, used)
        now = comm.rebuild() if which == "rebuilt" else comm
        if comm.rank == 0:
            # The writes begin when this rank is closing.
            now.before_close(closing.set)
        now.close()
        done.append(saving.done() and saving.exception() is None)

    run_ranks(program, 2)
    assert done == [True, True]
    assert len(un.checkpoint.load(tmp_path)["mine"]) == 9


def test_failing_rank_does_not_wait_for_its_save(tmp_path: Path) -> None:
    un.checkpoint.save(tmp_path, {"w": torch.zeros(3)})
    failed = threading.Event()

    def program(comm: un.Communicator) -> None:
        def wait(done: int, total: int) -> None:
            assert failed.wait(30)

        with ExitStack() as after, comm:
            after.callback(failed.set)
            saving = un.checkpoint.async_save(tmp_path, {"w": torch.ones(9000)}, comm, progress=wait)
            if comm.rank == 1:
                raise ArithmeticError("the program's own")
            assert isinstance(saving.exception(), un.errors.CommError)

    errors = run_ranks(program, 2, on_failure="continue")
    assert isinstance(errors[1], ArithmeticError)
    # The other may have been in async_save still.
    assert isinstance(errors[0], un.errors.PeerLostError | None)
    assert not un.checkpoint.load(tmp_path)["w"].any()


def test_processes_end_after_their_saves(tmp_path: Path) -> None:
    def program(comm: un.Communicator) -> None:
        un.checkpoint.async_save(tmp_path, {"w": torch.arange(100_000)}, comm)

    un.launch(program, 2, "gloo", threads=1)
    assert torch.equal(un.checkpoint.load(tmp_path)["w"], torch.arange(100_000))


def alone(comm: un.Communicator, path: str, how: str) -> str:
    """Rank 0 calls what all ranks should call together; the others go on."""
    state = {"w": torch.ones(3)}
    if how == "second save":
        un.checkpoint.async_save(path, state, comm).wait()
    started = time.monotonic()
    with pytest.raises(un.errors.MismatchError, match=r"ranks differ in operation: rank 0: barrier at .*") as caught:
        call_alone(comm, path, how)
    assert time.monotonic() - started < 5
    return str(caught.value)


def call_alone(comm: un.Communicator, path: str, how: str) -> None:
    if comm.rank == 0:
        if how == "Checkpointer":
            un.checkpoint.Checkpointer(path, comm).save(1, {"w": torch.ones(3)})
        else:
            un.checkpoint.async_save(path, {"w": torch.ones(3)}, comm)
    comm.all_reduce(torch.ones(1))


@short(
    "how, backend, ranks",
    product(["first save", "second save", "Checkpointer"], ["thread", "shm", "gloo"], [2, 3]),
    [("first save", "gloo", 3), ("second save", "thread", 3), ("second save", "shm", 2), ("Checkpointer", "gloo", 2)],
)
def test_one_rank_alone_is_told_at_once(tmp_path: Path, how: str, backend: str, ranks: int) -> None:
    for said in pool(backend, 3).run(alone, str(tmp_path / "c"), how, size=ranks):
        assert "all_reduce(sum, float32, 1 elements, shape (1,)) at " in said
        assert "bor" not in said


def failing(path: str, comm: un.Communicator | None = None) -> un.checkpoint.SaveHandle:
    return un.checkpoint.async_save(Path(path) / "file" / "x", {"w": torch.ones(3)}, comm)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "file").write_text("")
    return str(tmp_path)


REFUSED = r"File exists|Not a directory"


def test_failed_save_is_raised_by_the_next_one_once(folder: str) -> None:
    def program(comm: un.Communicator) -> None:
        failing(folder, comm)
        with pytest.raises(CheckpointError, match=REFUSED):
            un.checkpoint.save(folder + "/next", {"w": torch.ones(3)}, comm)
        un.checkpoint.save(folder + "/next", {"w": torch.ones(3)}, comm)
        failing(folder, comm)
        with pytest.raises(CheckpointError, match=REFUSED):
            un.checkpoint.async_save(folder + "/next", {"w": torch.ones(3)}, comm)
        seen = failing(folder, comm).exception()
        assert isinstance(seen, CheckpointError)
        un.checkpoint.async_save(folder + "/next", {"w": torch.zeros(3)}, comm).wait()

    run_ranks(program, 2)
    assert not un.checkpoint.load(folder + "/next")["w"].any()


def test_failed_save_is_raised_by_close(folder: str) -> None:
    def program(comm: un.Communicator) -> None:
        part = comm.dup()
        failing(folder, part)
        with pytest.raises(CheckpointError, match=REFUSED):
            part.close()
        part.close()
        with pytest.raises(KeyError):
            raise_after_save(comm, folder)

    run_ranks(program, 2)


def raise_after_save(comm: un.Communicator, folder: str) -> None:
    with comm.dup() as twin:
        failing(folder, twin)
        raise KeyError("the program's own error, which that of the save does not replace")


@pytest.mark.parametrize("backend", ["thread", "shm"])
def test_failed_save_is_the_error_of_the_rank(folder: str, backend: str) -> None:
    with pytest.raises(CheckpointError, match=REFUSED):
        un.launch(leave_it_failing, 2, backend, (folder,))


def leave_it_failing(comm: un.Communicator, folder: str) -> None:
    failing(folder, comm)


def test_failed_save_of_one_process_is_the_error_of_its_rank(folder: str) -> None:
    with pytest.raises(CheckpointError, match=REFUSED):
        un.launch(fail_alone, 2, "gloo", (folder,))


def fail_alone(comm: un.Communicator, folder: str) -> None:
    if comm.rank == 1:
        failing(folder)


@pytest.mark.parametrize(
    ("launched", "end"),
    [
        pytest.param(False, "", marks=pytest.mark.soak),
        pytest.param(False, "comm.close()", marks=pytest.mark.soak),
        (True, "sys.exit()"),
    ],
)
def test_failed_save_is_printed_at_exit(
    folder: str, launched: bool, end: str, capfd: pytest.CaptureFixture[str]
) -> None:
    script = Path(folder) / "train.py"
    script.write_text(
        "import sys, torch, unisono as un\ncomm = un.init()\n"
        f"un.checkpoint.async_save({folder!r} + '/file/x', {{'w': torch.ones(3)}}, comm)\n{end}\n"
    )
    if launched:
        code = main(["run", "-n", "1", str(script)])
    else:
        code = subprocess.run([sys.executable, str(script)], check=False, timeout=300).returncode
    printed = "".join(capfd.readouterr())
    assert re.search(rf"(CheckpointError|StorageError).*({REFUSED})", printed), printed
    assert bool(code) == bool(launched or end == "comm.close()")


def test_several_threads_save_without_a_communicator(tmp_path: Path) -> None:
    numbers = count()
    savings: list[un.checkpoint.SaveHandle] = []

    def save() -> None:
        savings.append(un.checkpoint.async_save(tmp_path / str(next(numbers)), {"x": 1}))

    with repeated(save):
        for _ in range(60):
            save()
    for saving in savings:
        saving.wait()
