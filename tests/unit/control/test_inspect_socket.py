"""`unisono status` finds this user's jobs by their inspect sockets, and asks a running job."""

from __future__ import annotations

import json
import os
import select
import shlex
import socket
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from unisono.control.client import SocketControl
from unisono.control.inspect_socket import InspectSocket, find_control, find_jobs
from unisono.control.server import ControlServer
from unisono.errors import CommError
from unisono.tools.cli import main

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
import socket
import select
from unisono.control.inspect_socket import InspectSocket

mine = InspectSocket(("127.0.0.1", 1), b"of a rank")
print(os.getpid(), flush=True)
while 0 not in select.select([mine.socket, 0], [], [])[0]:
    mine.answer()
"""


@pytest.mark.parametrize("between", [0, 2])
def test_status_finds_the_ranks_of_a_launcher(between: int, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    # Shells stand for any launcher, which is no part of the job, and for processes that fork ranks for it.
    command = f"{sys.executable} {tmp_path}/rank.py; true"
    for _ in range(between):
        command = f"sh -c {shlex.quote(command)}; true"
    launcher = ["sh", "-c", command]
    with subprocess.Popen(launcher, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        rank = int(job.stdout.readline())
        assert rank != job.pid
        assert find_control(job.pid) == find_control(rank) == (("127.0.0.1", 1), b"of a rank")
        assert find_jobs()[("127.0.0.1", 1), b"of a rank"] == [rank]


def test_status_of_another_process(capsys: pytest.CaptureFixture[str]) -> None:
    # Process 1 may have adopted ranks of other jobs.
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert main(["status", str(other.pid)]) == 1
        assert f"process {other.pid} is in no unisono job" in capsys.readouterr().err
        other.communicate(b"\n")


def test_inspect_socket_returns_the_control_address(monkeypatch: pytest.MonkeyPatch) -> None:
    # This process may have a part in other jobs, whose doors come first.
    monkeypatch.setattr(
        "unisono.control.inspect_socket.path_of", lambda kind, pid, number: f"\0{kind} test/{pid}/{number}"
    )
    with (
        closing(ControlServer(b"of the tests")) as server,
        closing(SocketControl(server.address, b"of the tests", 10.0)) as me,
    ):
        assert find_control(os.getpid()) == (server.address, b"of the tests")
        me.set("x", b"y")
        assert find_control(os.getpid())[0] == server.address
    with pytest.raises(CommError, match="is in no unisono job"):
        find_control(os.getpid())


def test_inspect_socket_rejects_other_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.control.inspect_socket.is_this_user", lambda other: False)
    door = InspectSocket(("127.0.0.1", 1), b"secret")
    try:
        with pytest.raises(CommError):
            find_control(os.getpid())
    finally:
        door.close()


def test_a_process_that_ends_before_it_answers_is_in_no_job() -> None:
    others = list(find_jobs().values()).count([os.getpid()])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0unisono/{os.getpid()}/15")
        listener.listen(1)

        def end() -> None:
            select.select([listener], [], [], 10.0)
            listener.close()

        ending = threading.Thread(target=end)
        ending.start()
        assert list(find_jobs().values()).count([os.getpid()]) == others
        ending.join()


def test_a_process_of_another_version_is_in_no_job() -> None:
    """It answers with other bytes, which look like the head of a long frame."""
    others = list(find_jobs().values()).count([os.getpid()])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0unisono/{os.getpid()}/15")
        listener.listen(1)

        def answer() -> None:
            select.select([listener], [], [], 10.0)
            with listener.accept()[0] as peer:
                peer.sendall(b"\x30\0\0\0" + bytes(range(48)))

        answering = threading.Thread(target=answer)
        answering.start()
        assert list(find_jobs().values()).count([os.getpid()]) == others
        answering.join()
