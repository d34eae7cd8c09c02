"""Events survive the process; `unisono autopsy` merges them; `unisono status` asks a running job."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import unisono as un
from unisono.control.client import SocketControl
from unisono.control.inspect_socket import InspectSocket, find_control, find_jobs
from unisono.control.server import Server
from unisono.diagnostics import event_log as events
from unisono.diagnostics.event_log import EventLog, read_events
from unisono.errors import CommError
from unisono.tools.cli import main


def test_last_events_are_kept_in_order(tmp_path: Path) -> None:
    record = EventLog(tmp_path / "a.events", rank=3, kept=4)
    for number in range(10):
        record.put("enter", "world", 3, number or None, f"call {number}")
    pid, rank, events = read_events(tmp_path / "a.events")
    assert (pid, rank) == (os.getpid(), 3)
    assert [(e.number, e.call, e.text) for e in events] == [(n + 1, n, f"call {n}") for n in range(6, 10)]


def test_long_texts_are_truncated_and_control_characters_escaped(tmp_path: Path) -> None:
    record = EventLog(tmp_path / "a.events", rank=0)
    record.put("enter", "g" * 100, 0, None, "\x1b[31m" + "t" * 1000)
    event = read_events(tmp_path / "a.events")[2][0]
    assert event.group == "g" * 48
    assert event.text.startswith("?[31mttt")
    assert event.call is None


def test_any_text_is_kept(tmp_path: Path) -> None:
    record = EventLog(tmp_path / "a.events", rank=0)
    record.put("error", "world", 0, None, "no file '\udcff'")
    assert read_events(tmp_path / "a.events")[2][0].text == "no file '?'"


def test_job_continues_without_an_event_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("UNISONO_EVENTS", str(tmp_path / "file"))
    assert un.launch(lambda comm: comm.rank, 2, "thread") == [0, 1]
    assert "no events are kept in UNISONO_EVENTS=" in caplog.text


def test_full_disk_is_detected_before_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        EventLog(tmp_path / "a.events", rank=0)


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


@given(data=st.binary(max_size=2000))
def test_hostile_file_is_rejected_or_read(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("events") / "x.events"
    EventLog(path, 0, kept=4).put("enter", "world", 0, 1, "text")
    whole = bytearray(path.read_bytes())
    whole[: len(data)] = data
    for content in (data, bytes(whole[: len(path.read_bytes())])):
        path.write_bytes(content)
        try:
            events = read_events(path)[2]
        except ValueError:
            continue
        assert all(event.text.isprintable() for event in events)


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
    assert "test_event_log.py:" in said
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


JOB = """
import threading, time, torch
import unisono as un

def program(comm):
    comm.all_reduce(torch.ones(2))
    if comm.rank == 0:
        print("ready", flush=True)
    if comm.rank == 1:
        time.sleep(60)  # here
    comm.barrier()

if __name__ == "__main__":
    un.launch(program, 2, "shm", threads=1)
"""


def test_status_of_a_running_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    line = 1 + next(i for i, text in enumerate(JOB.splitlines()) if "# here" in text)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as job:
        try:
            assert job.stdout is not None
            assert job.stdout.readline() == "ready\n"
            assert main(["status", str(job.pid), "--stacks", "--timeout", "5"]) == 0
            said = capsys.readouterr().out
            assert "2 ranks at the control plane" in said
            assert "its last was all_reduce #1 (sum, float32, (2,)) at job.py:6" in said
            assert f"its thread is at job.py:{line} in program" in said
            assert f"{script}:{line} in program" in said
            ranks = [int(text.split("process ")[1].split(")")[0]) for text in said.splitlines() if "(process" in text]
            assert main(["status", str(ranks[0])]) == 0
            control = find_control(job.pid)
            assert {job.pid, *ranks} <= set(find_jobs()[control])
            # Others may run jobs here, too.
            monkeypatch.setattr("unisono.tools.cli.commands.status.find_jobs", lambda: {control: [job.pid]})
            capsys.readouterr()
            assert main(["status"]) == 0
            assert f"{script}: 2 ranks at the control plane" in capsys.readouterr().out
            assert main(["status", "--json", "--timeout", "5"]) == 0
            (told,) = json.loads(capsys.readouterr().out)
            assert [(rank["rank"], rank["report"]["pid"]) for rank in told["ranks"]] == list(enumerate(ranks))
        finally:
            job.terminate()


def test_status_without_jobs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("unisono.tools.cli.commands.status.find_jobs", dict)
    assert main(["status"]) == 0
    assert "this user runs no job" in capsys.readouterr().out


RANK = """
import os
import select
from unisono.control.inspect_socket import InspectSocket

mine = InspectSocket(("127.0.0.1", 1), b"of a rank")
print(os.getpid(), flush=True)
while 0 not in select.select([mine.socket, 0], [], [])[0]:
    mine.answer()
"""


def test_status_finds_the_ranks_of_a_launcher(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    # The shell stands for any launcher: it is no part of the job.
    launcher = ["sh", "-c", f"{sys.executable} {tmp_path}/rank.py; true"]
    with subprocess.Popen(launcher, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        rank = int(job.stdout.readline())
        assert rank != job.pid
        assert find_control(job.pid) == find_control(rank) == (("127.0.0.1", 1), b"of a rank")
        assert find_jobs()[("127.0.0.1", 1), b"of a rank"] == [rank]


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


def test_autopsy_of_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    EventLog(tmp_path / "a.events", rank=0).put("enter", "world", 0, 1, "barrier #1")
    monkeypatch.setattr(events, "_host", lambda: b"another" + bytes(9))
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


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", "look at rank 1, the first to stop: it failed: KeyError: 'lr'"),
        pytest.param("exit", "look at rank 1, the first to stop: it left without closing its", marks=pytest.mark.soak),
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
    [("exit", 0, "it left without closing its communicator"), ("raise", 1, "it failed: KeyError: 'lr'")],
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


def test_status_of_another_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "1"]) == 1
    assert "process 1 is in no unisono job" in capsys.readouterr().err


def test_inspect_socket_returns_the_control_address(monkeypatch: pytest.MonkeyPatch) -> None:
    # This process may have a part in other jobs, whose doors come first.
    monkeypatch.setattr("unisono.control.inspect_socket._name", lambda pid, number: f"\0unisono test/{pid}/{number}")
    with (
        closing(Server(b"of the tests")) as server,
        closing(SocketControl(server.address, b"of the tests", 10.0)) as me,
    ):
        assert find_control(os.getpid()) == (server.address, b"of the tests")
        me.set("x", b"y")
        assert find_control(os.getpid())[0] == server.address
    with pytest.raises(CommError, match="is in no unisono job"):
        find_control(os.getpid())


def test_inspect_socket_rejects_other_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.control.inspect_socket._is_this_user", lambda other: False)
    door = InspectSocket(("127.0.0.1", 1), b"secret")
    try:
        with pytest.raises(CommError):
            find_control(os.getpid())
    finally:
        door.close()
