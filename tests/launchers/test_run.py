"""`unisono run`: the ranks of a script, their output, and their end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launcher_helpers import is_running
from printed import printed
from waiting import wait_until

from unisono.tools.cli import main

SCRIPT = """
import os
import sys
import time

what = sys.argv[1]
def wait():
    open(f"{sys.argv[2]}/{os.environ['RANK']}", "w").write(str(os.getpid()))
    time.sleep(1000)

if what in ("early", "two", "meet") and os.environ["UNISONO_RESTARTS"] == "0":
    from unisono.bootstrap import find
    from unisono.core.group import Group

    place = find(timeout_s=30)
    group = Group.world(place.rank, 2, place.name)
    place.control.exchange(group, "early", None, 30.0)
    if what == "meet":
        wait()
    if place.rank == 1:
        raise KeyError("first time")
    if what == "two":
        from unisono.control import process_exit

        # As long as the other rank's error would make this one wait for its end under another launcher.
        process_exit._GRACE_S = 60.0
        place.control.exchange(group, "late", None, 30.0)
    time.sleep(1000)

import torch
import unisono as un

with un.init(timeout=30) as comm:
    total = torch.tensor([comm.rank + 1])
    comm.all_reduce(total)
    print(f"sum {total.item()} backend {comm.backend}", flush=True)
    if comm.rank == 1:
        if what in ("raise", "survive"):
            raise KeyError("lr")
        if what == "exit":
            sys.exit(7)
        if what == "kill":
            os.kill(os.getpid(), 9)
        if what == "once" and os.environ["UNISONO_RESTARTS"] == "0":
            raise KeyError("first time")
    if what == "survive":
        try:
            comm.barrier()
        except un.errors.PeerLostError:
            sys.exit(print("goes on", flush=True))
    if what == "wait":
        wait()
    comm.barrier()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unisono", "run", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)


@pytest.mark.soak
@pytest.mark.parametrize("script", [("train.py",), ("-m", "train")])
def test_each_line_begins_with_its_rank(script: tuple[str, ...]) -> None:
    ended = run("-n", "3", "--backend", "gloo", *script, "plain", "--ranks", "5")
    assert ended.returncode == 0, ended.stderr
    assert sorted(printed(ended.stdout)) == [f"[{rank}] sum 6 backend gloo" for rank in range(3)]


@pytest.mark.parametrize(
    ("what", "error"), [("two", "first time"), pytest.param("raise", "lr", marks=pytest.mark.soak)]
)
def test_the_first_error_is_shown_once_and_the_others_are_counted(what: str, error: str) -> None:
    line = SCRIPT[: SCRIPT.index(f'raise KeyError("{error}")')].count("\n") + 1
    ended = run("-n", "2", "train.py", what)
    assert ended.returncode == 1
    lines = ended.stderr.splitlines()
    assert lines[0].startswith("[rank 1 of 2] Traceback (most recent call last")
    assert lines[1:] == [
        f'  File "train.py", line {line}, in <module>',
        f'    raise KeyError("{error}")',
        f"KeyError: '{error}'",
        "(1 other rank failed too)",
    ]


@pytest.mark.parametrize(
    ("what", "status", "sentence"),
    [
        ("exit", 7, "[rank 1 of 2] exited with status 7"),
        ("kill", 128 + 9, "[rank 1 of 2] was ended by SIGKILL (by the kernel, if memory ran out)"),
    ],
)
@pytest.mark.soak
def test_a_rank_without_an_error_is_named(what: str, status: int, sentence: str) -> None:
    ended = run("-n", "2", "train.py", what)
    assert ended.returncode == status
    assert ended.stderr.splitlines()[0] == sentence


@pytest.mark.soak
def test_others_go_on_after_a_failure_if_asked_to() -> None:
    ended = run("-n", "2", "--on-failure", "continue", "train.py", "survive")
    assert ended.returncode == 0
    assert ended.stdout.splitlines()[-1] == "[0] goes on"
    assert ended.stderr.splitlines()[-1] == "KeyError: 'lr'"


@pytest.mark.soak
def test_exit_statuses_as_json() -> None:
    ended = run("-n", "2", "--json", "train.py", "exit")
    result = json.loads(ended.stdout)
    assert (result["status"], result["first"], result["restarts"], result["ranks"]["1"]) == (7, 1, 0, 7)
    assert "[0] sum 3" in ended.stderr


# "early", "two" and "meet": the first ranks meet and fail without torch, whose import takes most of the time.
@pytest.mark.soak
@pytest.mark.parametrize("when", ["early", "once"])
def test_all_ranks_start_again_after_a_failure(when: str) -> None:
    ended = run("-n", "2", "--restarts", "1", "--no-prefix", "train.py", when)
    assert ended.returncode == 0
    assert "start all ranks again (1 of 1 restarts)" in ended.stderr
    assert ended.stdout.splitlines() == ["sum 3 backend shm"] * {"early": 2, "once": 4}[when]


def test_interrupt_of_a_starting_rank_prints_no_traceback(folder: Path) -> None:
    # Python imports this first.
    (folder / "sitecustomize.py").write_text(
        "import os, signal\nif 'LOCAL_RANK' in os.environ: os.kill(os.getpid(), signal.SIGINT)"
    )
    command = ["env", "--default-signal=INT", sys.executable, "-m", "unisono", "run", "-n", "2"]
    command += ["--start", "plain", "train.py"]
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    ended = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=300)
    assert ended.returncode == 128 + signal.SIGINT
    assert "Traceback" not in ended.stderr
    assert "of 2] was ended by SIGINT" in ended.stderr


@pytest.mark.parametrize(
    ("how", "what"),
    [
        (signal.SIGKILL, "meet"),
        pytest.param(signal.SIGKILL, "wait", marks=pytest.mark.soak),
        pytest.param(signal.SIGINT, "wait", marks=pytest.mark.soak),
    ],
)
def test_ranks_end_with_their_launcher(folder: Path, how: signal.Signals, what: str) -> None:
    # A shell ignores interrupts for what it starts in the background, tests for instance.
    default = ["env", "--default-signal=INT"]
    command = [*default, sys.executable, "-m", "unisono", "run", "-n", "2", "train.py", what, str(folder)]
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    files = [folder / str(rank) for rank in range(2)]
    assert wait_until(lambda: all(file.exists() and file.read_text() for file in files), 60.0)
    ranks = [int(file.read_text()) for file in files]
    launcher.send_signal(how)
    said = launcher.communicate(timeout=300)[1]
    assert wait_until(lambda: not any(map(is_running, ranks)))
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["-n", "0", "train.py"], "-n must be at least 1, not 0"),
        (["-n", "2", "absent.py"], "there is no file 'absent.py'"),
        (["-n", "1", "absent"], "there is no file 'absent'"),
        (["-n", "2", "--restarts", "-1", "train.py"], "--restarts must be at least 0"),
        (["train.py"], "pass -n, the number of ranks, or --hosts"),
        (["-n", "2", "--hosts", "203.0.113.9", "--host", "own", "train.py"], "0 of --hosts are addresses of this host"),
        (["-n", "2", "--hosts", "127.0.0.1", "--host", "1", "train.py"], "--host 1 is not in 0 to 0"),
        (["--hosts", "a,b:0", "train.py"], "--hosts takes names or addresses, such as a,b:4 or [fd77::1]:4, not 'b:0'"),
        (["--hosts", "a,b:c", "train.py"], "--hosts takes names or addresses, such as a,b:4 or [fd77::1]:4, not 'b:c'"),
        (["--hosts", ",", "train.py"], "--hosts ',' names no host"),
        (["--hosts", "localhost,b", "train.py"], "must be an address that the others can reach, not localhost"),
        (["--hosts", "::1,b", "train.py"], "must be an address that the others can reach, not ::1"),
        (["--hosts", "a,b", "--stdin", "0", "train.py"], "--stdin needs ranks of this host"),
    ],
)
def test_impossible_requests(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.soak
def test_torch_and_unisono_start_side_by_side(folder: Path) -> None:
    (folder / "both.py").write_text(
        "import torch\n"
        "import torch.distributed as dist\n"
        "import unisono as un\n"
        "dist.init_process_group('gloo')\n"
        "with un.init() as comm:\n"
        "    total = torch.ones(1)\n"
        "    dist.all_reduce(total)\n"
        "    comm.all_reduce(total)\n"
        "    print(total.item())\n"
        "dist.destroy_process_group()\n"
    )
    ended = run("-n", "2", "--no-prefix", "both.py")
    assert (ended.returncode, ended.stdout.splitlines()) == (0, ["4.0", "4.0"]), ended.stderr
