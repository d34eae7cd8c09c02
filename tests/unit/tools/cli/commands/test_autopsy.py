"""`unisono autopsy` merges the ranks' events, and names the rank to look at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono as un
from unisono.diagnostics import event_log as events
from unisono.diagnostics.event_log import EventLog
from unisono.tools.cli import main


def crash(comm: Any) -> None:
    comm.all_reduce(torch.ones(2))
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def test_autopsy_names_the_killed_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UNISONO_EVENTS", str(tmp_path / "events"))
    un.launch(crash, 3, "shm", on_failure="continue", threads=1)
    assert main(["autopsy", str(tmp_path / "events")]) == 1
    said = capsys.readouterr().out
    assert (
        "look at rank 1, the first to stop: it was killed or crashed: its process is gone without an error, outside"
        in said
    )
    assert "outside of any call, after all_reduce #1" in said
    assert "test_autopsy.py:" in said
    assert "rank 0 (process" in said
    assert "failed: PeerLostError" in said


def test_autopsy_of_a_successful_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UNISONO_EVENTS", str(tmp_path))
    un.launch(lambda comm: comm.barrier(), 2, "thread")
    assert main(["autopsy", str(tmp_path)]) == 0
    assert "ended normally" in capsys.readouterr().out


def test_autopsy_of_an_empty_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autopsy", str(tmp_path / "none")]) == 2
    assert main(["autopsy", str(tmp_path)]) == 2
    (tmp_path / "x.events").write_bytes(b"x" * 100)
    assert main(["autopsy", str(tmp_path)]) == 2
    assert "holds no events of unisono" in capsys.readouterr().err


def test_autopsy_of_equal_and_impossible_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, time_s in enumerate((5.0, 5.0, 1e300, float("nan"))):
        monkeypatch.setattr(events.time, "time", lambda time_s=time_s: time_s)
        EventLog(tmp_path / f"{number}.events", rank=0).put("end", "world", 0, None, f"text {number}")
    monkeypatch.undo()
    assert main(["autopsy", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "text 0" in said
    assert "text 1" in said
    assert "text 2" not in said
    assert main(["autopsy", str(tmp_path), "--last", "0"]) == 0
    assert "text" not in capsys.readouterr().out


ENDS = """
import os, signal, sys, time
from pathlib import Path
from unisono.diagnostics.event_log import EventLog

log = EventLog(Path(sys.argv[1]) / f"{sys.argv[2]}.events", int(sys.argv[2]))
log.put("enter", "world", int(sys.argv[2]), 1, "barrier #1 at train.py:3")
print(flush=True)
sys.stdin.read()
"""


def test_autopsy_tells_killed_from_stopped_and_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    ranks = [subprocess.Popen([sys.executable, "-c", ENDS, str(tmp_path), str(number)], **pipe) for number in range(3)]
    try:
        for rank in ranks:
            rank.stdout.readline()
        os.kill(ranks[0].pid, signal.SIGSTOP)
        os.waitid(os.P_PID, ranks[0].pid, os.WSTOPPED | os.WNOWAIT)
        assert main(["autopsy", str(tmp_path), "--json"]) == 1
        told = json.loads(capsys.readouterr().out)
        assert (told["first"], [rank["state"] for rank in told["ranks"]]) == (0, ["stopped", "running", "running"])
        ranks[2].kill()
        ranks[2].wait()
        EventLog(tmp_path / "3.events", 3).put("error", "world", 3, 1, "PeerLostError in barrier: rank 2 was lost")
        assert main(["autopsy", str(tmp_path)]) == 1
        said = capsys.readouterr().out
        assert "rank 0 (process" in said
        assert "is stopped by a signal (SIGSTOP, SIGTSTP) in barrier #1 at train.py:3 of world" in said
        assert "still runs in barrier #1 at train.py:3 of world" in said
        assert "look at rank 2, the first to stop: it was killed or crashed" in said
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_autopsy_blames_no_rank_that_the_launcher_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks compute when rank 2 fails, and end without an error of their own."""
    pipe: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    ranks = [subprocess.Popen([sys.executable, "-c", ENDS, str(tmp_path), str(number)], **pipe) for number in range(2)]
    for rank in ranks:
        rank.stdout.readline()
        rank.kill()
        rank.communicate()
    EventLog(tmp_path / "2.events", 2).put("error", "world", 2, 1, "RuntimeError: bad batch")
    assert main(["autopsy", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "look at rank 2, the first to stop: it failed: RuntimeError: bad batch" in said
    assert said.count("was ended after another rank had failed") == 2
    # One that another rank has missed was lost before.
    EventLog(tmp_path / "3.events", 3).put("error", "world", 3, 1, "PeerLostError in barrier: rank 1 was lost")
    assert main(["autopsy", str(tmp_path)]) == 1
    assert "look at rank 1, the first to stop: it was killed or crashed" in capsys.readouterr().out


def test_autopsy_of_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    EventLog(tmp_path / "a.events", rank=0).put("enter", "world", 0, 1, "barrier #1")
    monkeypatch.setattr(events, "process_space", lambda: b"another" + bytes(9))
    assert main(["autopsy", str(tmp_path)]) == 1
    assert "recorded no end in barrier #1 of world" in capsys.readouterr().out


UNCAUGHT = """
import sys
import torch
import unisono as un

comm = un.init(timeout=30)
comm.all_reduce(torch.ones(2))
if comm.rank == 1:
    sys.exit(0) if sys.argv[1] == "exit" else {}["lr"]
comm.barrier()
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", "look at rank 1, the first to stop: it failed: KeyError: 'lr'"),
        ("exit", "look at rank 1, the first to stop: it left without closing its"),
    ],
)
def test_autopsy_of_an_error_between_calls(
    how: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(UNCAUGHT)
    monkeypatch.setenv("UNISONO_EVENTS", str(tmp_path))
    assert main(["run", "-n", "2", "--backend", "gloo", str(tmp_path / "train.py"), how])
    capsys.readouterr()
    assert main(["autopsy", str(tmp_path)]) == 1
    assert text in capsys.readouterr().out


ALONE = """
import multiprocessing, sys
import torch
import unisono as un

def forked():
    global comm
    comm = un.init()
    comm.barrier()

comm = un.init()
comm.all_reduce(torch.ones(2))
child = multiprocessing.get_context("fork").Process(target=forked)
child.start()
child.join()
comm.barrier()
{}["lr"] if sys.argv[1] == "raise" else sys.exit(0)
"""


@pytest.mark.parametrize(
    ("how", "status", "text"),
    [
        pytest.param("exit", 0, "it left without closing its communicator", marks=pytest.mark.soak),
        ("raise", 1, "it failed: KeyError: 'lr'"),
    ],
)
def test_autopsy_of_a_world_of_one(
    how: str, status: int, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {**os.environ, "UNISONO_EVENTS": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", ALONE, how], check=False, env=environment, stderr=subprocess.DEVNULL)
    assert ended.returncode == status
    assert main(["autopsy", str(tmp_path), "--json"]) == status
    child, parent = json.loads(capsys.readouterr().out)["ranks"]
    assert text in f"it {parent['text']}"
    # A forked child does not record its own end as its parent's.
    for rank, end in (child, "exit"), (parent, ("exit", "error")[status]):
        assert rank["events"][-1]["kind"] == end
        assert {event["kind"] for event in rank["events"][:-1]} == {"enter", "leave"}
