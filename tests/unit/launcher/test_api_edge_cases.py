"""`launch` where something is odd: forks, children, closed outputs, exits, interrupts, results that cannot be read."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

import unisono as un


def square(comm: un.Communicator, x: int = 3) -> int:
    return comm.rank * x


def fork_a_caller(comm: un.Communicator) -> tuple[str, float]:
    reader, writer = os.pipe()
    if os.fork() == 0:
        said = "nothing"
        try:
            with comm:
                comm.all_reduce(torch.ones(2))
        except un.CommError as error:
            said = str(error)
        os.write(writer, said.encode())
        os._exit(0)
    os.wait()
    tensor = torch.ones(2)
    comm.all_reduce(tensor)
    return os.read(reader, 4096).decode(), tensor[0].item()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_forked_calls_are_rejected_and_the_parent_continues(backend: str) -> None:
    for said, total in un.launch(fork_a_caller, 2, backend, timeout=10.0):
        assert "of which this process is a fork" in said
        assert total == 2.0


def leave_a_child(comm: un.Communicator) -> None:
    reader, _writer = os.pipe()
    child = os.fork()
    if child == 0:
        # Holds all that the rank holds, for longer than any wait.
        signal.alarm(60)
        os.read(reader, 1)
    Path(os.environ["UNISONO_TEST_FILE"]).write_text(str(child))
    # A signal without a name.
    os.kill(os.getpid(), signal.SIGRTMIN + 6)


def test_children_do_not_hide_the_death_of_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_TEST_FILE", str(tmp_path / "child"))
    started = time.monotonic()
    with pytest.raises(un.errors.PeerLostError, match=f"was ended by signal {signal.SIGRTMIN + 6}"):
        un.launch(leave_a_child, 1, "gloo")
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert time.monotonic() - started < 30


class Unreadable:
    def __reduce__(self) -> tuple[type, tuple[str]]:
        return int, ("no number",)


def test_unreadable_result_is_a_failure_of_its_rank() -> None:
    found = un.launch(lambda comm: Unreadable() if comm.rank else 5, 2, "gloo", on_failure="continue")
    assert found[0] == 5
    assert isinstance(found[1], ValueError)
    assert found[1].__notes__ == ["while reading the result of rank 1"]


def test_unsendable_arguments_leave_nothing_behind() -> None:
    before = threading.active_count()
    with pytest.raises(TypeError, match="cannot be sent to the ranks"):
        un.launch(square, 2, "gloo", args=(threading.Lock(),))
    assert threading.active_count() == before


@pytest.mark.parametrize("backend", ["thread", "gloo"])
def test_exiting_rank_does_not_end_the_caller(backend: str) -> None:
    with pytest.raises(un.errors.PeerLostError, match=r"rank 1 of 2 ended by SystemExit\(0\)") as caught:
        un.launch(lambda comm: sys.exit(0) if comm.rank else comm.barrier(), 2, backend)
    assert caught.value.peer == 1


def test_missing_gpu_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(un.errors.UnavailableError, match="torch sees none"):
        un.launch(square, 2, "thread", device="cuda")


TYPED = """
    import sys, unisono as un
    from dataclasses import dataclass
    from functools import partial
    @dataclass
    class Settings:
        rate: float
    def program(comm, settings):
        print("from", comm.rank, flush=True)
        return settings
    found = un.launch(partial(program, settings=Settings(0.5)), 2, "gloo")
    assert found == [Settings(0.5)] * 2, found
    with open(sys.argv[1], "w") as file:
        file.write("done")
"""


@pytest.mark.soak
def test_typed_programs_carry_their_classes(tmp_path: Path) -> None:
    ran = subprocess.run(
        ["sh", "-c", 'exec "$0" - "$1" >&-', sys.executable, f"{tmp_path}/said"],
        input=textwrap.dedent(TYPED),
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert (tmp_path / "said").read_text() == "done", ran.stderr


def test_interrupt_ends_thread_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def interrupted(*_: object) -> None:
        assert begun.wait(20)
        raise KeyboardInterrupt

    monkeypatch.setattr("unisono.launcher.supervisor.seconds_left", interrupted)
    ended: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def wait_for_each_other(comm: un.Communicator) -> None:
        try:
            comm.barrier()
            begun.set()
            comm.recv(torch.ones(1), src=1 - comm.rank)
        except un.CommError as error:
            ended.put(error)

    with pytest.raises(KeyboardInterrupt):
        un.launch(wait_for_each_other, 2, "thread")
    for error in (ended.get(timeout=20), ended.get(timeout=20)):
        assert isinstance(error, un.errors.AbortedError)
        assert "launch was ended by KeyboardInterrupt" in str(error)


@pytest.mark.parametrize("place", ["ThreadRank", "LocalHub.control"])
def test_error_outside_the_program_of_a_thread_rank(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no rank can be made")

    monkeypatch.setattr(f"unisono.launcher.api.{place}", fails)
    with pytest.raises(RuntimeError, match="no rank can be made"):
        un.launch(square, 2, "thread")


@pytest.mark.soak
def test_temporary_directory_with_a_long_name(tmp_path: Path) -> None:
    folder, script = tmp_path / ("x" * 90), tmp_path / "ranks.py"
    folder.mkdir()
    script.write_text("import unisono as un\nif __name__ == '__main__':\n    un.launch(print, 2, 'shm')\n")
    surroundings = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, str(script)], env=surroundings, capture_output=True, text=True, check=False, timeout=60
    )
    # Later Pythons take another directory by themselves.
    assert done.returncode == 0 or "set TMPDIR=/tmp" in done.stderr.splitlines()[-1]
