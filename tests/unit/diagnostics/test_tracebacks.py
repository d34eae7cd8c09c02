"""Uncaught errors show the user's lines and one sentence, and which rank it was."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import unisono as un
from unisono.diagnostics import tracebacks
from unisono.diagnostics.tracebacks import format_error

MISMATCH = """
import torch
import unisono as un

def step(comm):
    comm.all_reduce(torch.ones(4 if comm.rank else 3))

with un.init("shm", timeout=20) as comm:
    step(comm)
"""
OWN_ERROR = """
import torch
import unisono as un

with un.init("shm", timeout=20) as comm:
    if comm.rank == 1:
        raise KeyError("lr")
    comm.barrier()
"""
LAUNCHED = """
import torch
import unisono as un

if __name__ == "__main__":
    SIZE = 3

    def program(comm):
        comm.all_reduce(torch.ones(SIZE + comm.rank))

    un.launch(program, 2, "shm", timeout=20)
"""


FORK = """
import os
import torch

if os.environ["RANK"] == "0" and os.fork() == 0:
    os.environ["RANK"] = "1"
    os.environ["TORCHELASTIC_ERROR_FILE"] = os.environ["TORCHELASTIC_ERROR_FILE"].replace("/0", "/1")
    os.dup2(int(os.environ["ERRORS_OF_RANK_1"]), 2)
"""
"""What Python imports before the script: both ranks have torch, which one of them has imported."""


def run_ranks(folder: Path, program: str, **environment: str) -> list[str]:
    """Standard error of each of two ranks of a script, with the variables that torchrun sets."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(program))
    (folder / "sitecustomize.py").write_text(FORK)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    of_rank_1, written = os.pipe()
    variables = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_ERROR_FILE": f"{folder}/0",
        "ERRORS_OF_RANK_1": str(written),
        "PYTHONPATH": str(folder),
    }
    with os.fdopen(of_rank_1) as second:
        first = subprocess.Popen(
            [sys.executable, script],
            env={**os.environ, **variables, **environment},
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[written],
        )
        os.close(written)
        return [first.communicate(timeout=300)[1], second.read()]


def test_a_mismatch_shows_the_users_lines_once(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, MISMATCH)
    assert first.startswith("[rank 0 of 2] Traceback (most recent call last; ")
    assert first.count("File ") == 2
    assert "in step" in first
    assert "rank 1: all_reduce(sum, float32, 4 elements" in first
    assert len(first.splitlines()) <= 12
    assert len(second.splitlines()) == 1
    assert second.startswith("[rank 1 of 2] train.py:6: ")
    assert "MismatchError" in second


@pytest.mark.soak
def test_the_loss_of_a_peer_is_one_line_and_its_own_error_is_whole(tmp_path: Path) -> None:
    survivor, culprit = run_ranks(tmp_path, OWN_ERROR)
    assert culprit.startswith("[rank 1 of 2] Traceback")
    assert culprit.endswith("KeyError: 'lr'\n")
    assert survivor.startswith("[rank 0 of 2] train.py:8: ")
    assert "rank 1 failed in the program: KeyError: 'lr'" in survivor
    assert len(survivor.splitlines()) == 1


@pytest.mark.soak
def test_torchruns_report_has_the_same_text_and_the_cause_first(tmp_path: Path) -> None:
    texts = run_ranks(tmp_path, OWN_ERROR)
    reports = [json.loads((tmp_path / str(rank)).read_text())["message"] for rank in range(2)]
    assert [report["extraInfo"]["py_callstack"] for report in reports] == texts
    assert reports[1]["message"] == "KeyError: 'lr'"
    survivor, culprit = (int(report["extraInfo"]["timestamp"]) for report in reports)
    assert culprit < survivor


@pytest.mark.soak
def test_all_frames_are_shown_if_asked_for(tmp_path: Path) -> None:
    for text in run_ranks(tmp_path, MISMATCH, UNISONO_TRACEBACK="full"):
        assert text.count("File ") > 5
        assert "unisono/communicator.py" in text


@pytest.mark.soak
def test_launch_shows_the_ranks_lines_after_the_callers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LAUNCHED)
    command = [sys.executable, tmp_path / "train.py"]
    ended = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True, timeout=300)
    lines = ended.stderr.splitlines()
    assert lines[0].startswith("Traceback (most recent call last; ")
    assert [line.rpartition(", in ")[2] for line in lines if line.startswith("  File ")] == ["<module>", "program"]
    assert lines[-1] == "(1 other rank failed too: 1 MismatchError)"
    assert len(lines) <= 12


def test_causes_inside_the_library_are_hidden_and_the_users_own_stay() -> None:
    def fail() -> None:
        try:
            raise KeyError("own cause")
        except KeyError as error:
            raise ValueError("sentence") from error

    with pytest.raises(ValueError, match="sentence") as caught:
        fail()
    text = format_error(caught.value)
    assert "KeyError: 'own cause'" in text
    assert text.endswith("ValueError: sentence\n")


def test_a_cause_outside_the_users_code_is_hidden() -> None:
    with pytest.raises(un.errors.CommTimeoutError) as caught:
        un.init(init_method="tcp://127.0.0.1:1", rank=1, world_size=2, timeout=0.2)
    assert caught.value.__cause__ is not None
    assert "direct cause" not in format_error(caught.value)


def test_calls_within_the_library_are_at_the_users_line() -> None:
    def program(comm: un.Communicator) -> None:
        comm.all_gather_object("some")
        un.broadcast_parameters(torch.nn.Linear(2, 1 + comm.rank), comm)

    texts = [str(error) for error in un.launch(program, 2, "shm", timeout=20, on_failure="continue")]
    for rank, text in enumerate(texts):
        assert text.startswith(f"rank {rank} of 2, ")
        assert "ranks differ in 'parameters of the model', at ['bias']: rank 0" in text
        assert "objects.py" not in text
    # The rank that fails first tells of all calls.
    assert max(text.count(f"at {Path(__file__).name}:") for text in texts) >= 4


RAY = """
import sys

def hook(kind, error, trace):
    print("Ray shows", error, file=sys.stderr)

hook.__module__ = "ray._private.worker"
sys.excepthook = hook
import unisono as un

def fail(comm):
    raise KeyError("no such sample")

if sys.argv[1] == "ours":
    un.launch(fail, 1, "thread")
with un.init():
    pass
raise ValueError("of the program alone")
"""


@pytest.fixture
def hook_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """An uncaught error is shown by Ray, until this process has a communicator."""

    def hook(kind: type[BaseException], error: BaseException, trace: object) -> None:
        print("Ray shows", error, file=sys.stderr)

    hook.__module__ = "ray._private.worker"
    monkeypatch.setattr(sys, "excepthook", hook)
    monkeypatch.setattr(tracebacks, "_display", tracebacks._ErrorDisplay())


@pytest.mark.usefixtures("hook_of_ray")
def test_error_of_a_rank_is_not_left_to_the_hook_of_ray(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(comm: un.Communicator) -> None:
        raise KeyError("no such sample")

    with pytest.raises(KeyError) as caught:
        un.launch(fail, 1, "thread")
    sys.excepthook(caught.type, caught.value, caught.tb)
    shown = capsys.readouterr().err
    assert "frames of unisono and torch are hidden" in shown
    assert 'raise KeyError("no such sample")' in shown
    assert "Ray shows" not in shown


@pytest.mark.usefixtures("hook_of_ray")
def test_error_of_the_program_alone_is_left_to_the_hook_of_ray(capsys: pytest.CaptureFixture[str]) -> None:
    un.init().close()
    with pytest.raises(ValueError, match="alone") as caught:
        raise ValueError("of the program alone")
    sys.excepthook(caught.type, caught.value, caught.tb)
    assert capsys.readouterr().err == "Ray shows of the program alone\n"


@pytest.mark.soak
@pytest.mark.parametrize("whose", ["ours", "others"])
def test_hook_of_ray_shows_only_errors_that_do_not_concern_ranks(whose: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(RAY)
    command = [sys.executable, "program.py", whose]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False)
    if whose == "others":
        assert ended.stderr == "Ray shows of the program alone\n"
    else:
        assert "frames of unisono and torch are hidden" in ended.stderr
        assert 'raise KeyError("no such sample")' in ended.stderr
        assert "Ray shows" not in ended.stderr
