"""`unisono run --hosts`: ranks on other hosts, by a command that stands in for ssh, and by sshd between namespaces."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launcher_helpers import is_running
from waiting import wait_until

from unisono.testing.namespaced_ranks import Network, obstacle

Start = Callable[..., "subprocess.Popen[str]"]

RUN = ["env", "--default-signal=INT,HUP", sys.executable, "-m", "unisono", "run"]

# `unisono` that gives ranks less time to end by themselves after a failure.
IMPATIENT = """
import sys
from unisono.launcher import script
from unisono.tools.cli import main
script.SCRIPT_GRACE_S = 0.5
sys.exit(main())
"""

# As sshd starts a command: with little of an environment, and somewhere else.
STAND_IN = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
case $1 in refusing) echo 'Permission denied (publickey).' >&2; exit 255;; esac
cd /
exec env -i HOME=/home/$1 PATH=/usr/bin:/bin sh -c "exec $2"
"""
FACTS = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "HOME", "OF_THE_USER")
secret = len(os.environ["UNISONO_SECRET"])
print(json.dumps([os.getcwd(), secret, sys.argv, sys.stdin.read(), *(os.environ.get(name) for name in names)]))
"""
WAIT = """
import os, signal, subprocess, sys, time
rank = os.environ["RANK"]
def save(number, frame):
    open(f"saved-{rank}", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
child = subprocess.Popen(["sleep", "1000"])
open(f"ready-{rank}", "w").write(f"{os.getpid()} {child.pid} {os.getppid()}")
os.rename(f"ready-{rank}", f"pids-{rank}")
while True:
    time.sleep(0.05)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ssh").write_text(STAND_IN)
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "facts.py").write_text(FACTS)
    (tmp_path / "wait.py").write_text(WAIT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(folder: Path, *words: str, hosts: str = "far,farther:3") -> list[str]:
    return [*RUN, "--ssh", f"{folder}/ssh -x", "--hosts", hosts, *words]


def run(folder: Path, *words: str, hosts: str = "far,farther:3", **options: Any) -> subprocess.CompletedProcess[str]:
    line = command(folder, *words, hosts=hosts)
    return subprocess.run(line, check=False, capture_output=True, text=True, timeout=300, **options)


@pytest.mark.parametrize("how", [pytest.param("plain", marks=pytest.mark.soak), "fork"])
@pytest.mark.usefixtures("light")
def test_ranks_of_all_hosts_find_their_place_and_the_users_surroundings(folder: Path, how: str) -> None:
    ended = run(folder, "--start", how, "facts.py", "-a", env={**os.environ, "OF_THE_USER": "x y'z"}, input="words")
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    lines = dict(line.split("] ", 1) for line in ended.stdout.splitlines())
    assert {rank: json.loads(line) for rank, line in lines.items()} == {
        f"[{rank}": [
            # Standard input of the agent is the launcher's line to it, and that of a rank is empty.
            *(str(folder), 64, ["facts.py", "-a"], ""),
            *(str(rank), "4", *(("0", "1", "0") if rank == 0 else (str(rank - 1), "3", "1"))),
            *("far", "/home/far" if rank == 0 else "/home/farther", "x y'z"),
        ]
        for rank in range(4)
    }


@pytest.mark.usefixtures("light")
def test_output_passes_whole(folder: Path) -> None:
    (folder / "print.py").write_text(
        # Whole lines: the rest of one that comes late may follow what another rank prints.
        "import os\nfor number in range(20000):\n    os.write(1, f\"{os.environ['RANK']} {number}\\n\".encode())\n"
        "os.write(2, b'\\xff bytes\\nno end')\n"
    )
    line = command(folder, "--no-prefix", "print.py", hosts="far:2")
    ended = subprocess.run(line, check=True, capture_output=True, timeout=300)
    expected = [f"{rank} {number}" for rank in range(2) for number in range(20000)]
    assert sorted(ended.stdout.decode().splitlines()) == sorted(expected)
    assert ended.stderr.count(b"\xff bytes\n") == 2
    assert ended.stderr.count(b"no end") == 2


@pytest.mark.usefixtures("light")
def test_first_error_of_all_hosts_is_shown_once(folder: Path) -> None:
    (folder / "raise.py").write_text("import os\nif os.environ['RANK'] == '2':\n    raise KeyError('lr')\n")
    ended = run(folder, "raise.py")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.splitlines()[0].startswith("[rank 2 of 4] Traceback (most recent call last")
    assert ended.stderr.splitlines()[1:] == [
        '  File "raise.py", line 3, in <module>',
        "    raise KeyError('lr')",
        "KeyError: 'lr'",
    ]


@pytest.mark.soak
def test_exit_statuses(folder: Path) -> None:
    (folder / "exit.py").write_text("import os, sys\nsys.exit({'3': 7}.get(os.environ['RANK'], 0))")
    ended = run(folder, "--json", "exit.py")
    result = json.loads(ended.stdout)
    assert (ended.returncode, result["status"], result["first"]) == (7, 7, 3)
    assert result["ranks"] == {"0": 0, "1": 0, "2": 0, "3": 7}


def test_all_ranks_start_again_after_a_failure(folder: Path) -> None:
    (folder / "once.py").write_text("import os, sys\nsys.exit(os.environ['UNISONO_RESTARTS'] == '0')")
    ended = run(folder, "--start", "plain", "--restarts", "1", "once.py", hosts="far,farther")
    assert ended.returncode == 0
    assert "start all ranks again (1 of 1 restarts)" in ended.stderr


def started(
    start: Start, folder: Path, line: list[str]
) -> tuple[subprocess.Popen[str], dict[int, list[int]], dict[int, int]]:
    """Start four ranks that wait; return the job, the processes of each rank, and the parent of each rank."""
    job = start(line)
    assert wait_until(lambda: len([*folder.glob("pids-*")]) == 4, 60.0), job.communicate(timeout=300)
    found = {int(path.name[5:]): [int(word) for word in path.read_text().split()] for path in folder.glob("pids-*")}
    return job, {rank: pids[:2] for rank, pids in found.items()}, {rank: pids[2] for rank, pids in found.items()}


def everything(job: subprocess.Popen[str], pids: dict[int, list[int]]) -> set[int]:
    """Return the ranks, their children, and all between them and the launcher or sshd: agents and templates."""
    names = {pid: name for pid, name, _ in processes()}
    parent_of = {pid: parent for pid, _, parent in processes()}
    found = {pid for some in pids.values() for pid in some}
    for rank, _ in pids.values():
        process = parent_of[rank]
        while process not in (0, 1, job.pid) and names[process] != "sshd":
            found.add(process)
            process = parent_of[process]
    assert found > {pid for some in pids.values() for pid in some}, "there is no agent"
    return found


@pytest.mark.parametrize("how", [pytest.param("plain", marks=pytest.mark.soak), "fork"])
@pytest.mark.usefixtures("light")
def test_nothing_is_left_of_a_launcher_that_was_killed(start: Start, folder: Path, how: str) -> None:
    job, pids, _ = started(start, folder, command(folder, "--start", how, "wait.py"))
    running = everything(job, pids)
    job.kill()
    job.communicate(timeout=300)
    assert wait_until(lambda: not any(map(is_running, running)))


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)])
@pytest.mark.usefixtures("light")
def test_signals_reach_ranks_on_all_hosts(start: Start, folder: Path, number: signal.Signals) -> None:
    job, pids, _ = started(start, folder, command(folder, "--grace", "5", "wait.py"))
    running = everything(job, pids)
    job.send_signal(number)
    job.communicate(timeout=300)
    assert job.returncode == 128 + number
    if number == signal.SIGTERM:
        assert len([*folder.glob("saved-*")]) == 4
    assert wait_until(lambda: not any(map(is_running, running)))


def test_lost_host_is_named(start: Start, folder: Path) -> None:
    line = command(folder, "--start", "plain", "--grace", "1", "wait.py")
    # Rank 0 does not end by itself, for which it would be given 5 s.
    line[line.index("-m") : line.index("run")] = ["-c", IMPATIENT]
    job, pids, parents = started(start, folder, line)
    # The parent of plain ranks is the agent, which the stand-in has become.
    assert parents[0] != parents[1] == parents[2] == parents[3]
    running = everything(job, pids)
    os.kill(parents[1], signal.SIGKILL)
    said = job.communicate(timeout=300)[1].splitlines()
    assert said[0] == f"host farther, with ranks 1 to 3 of 4, was lost: {folder}/ssh was ended by SIGKILL"
    assert len(said) <= 12
    assert job.returncode == 128 + signal.SIGKILL
    assert wait_until(lambda: not any(map(is_running, running)))


@pytest.mark.parametrize(
    ("hosts", "words", "sentences"),
    [
        (
            "far,refusing:2",
            # The rank that runs ends by itself, as the others would be given 5 s to.
            ["facts.py"],
            [
                "host refusing, with ranks 1 to 2 of 3, has started none of them: {ssh} ended with exit status 255",
                "  Permission denied (publickey).",
            ],
        ),
        (
            "far",
            ["--python", "/absent/python", "wait.py"],
            [
                "host far, with rank 0 of 1, has started none of them: {ssh} ended with exit status 127",
                "/absent/python",
            ],
        ),
    ],
)
def test_host_that_starts_no_ranks_is_named(folder: Path, hosts: str, words: list[str], sentences: list[str]) -> None:
    begun = time.monotonic()
    ended = run(folder, "--grace", "1", *words, hosts=hosts)
    assert time.monotonic() - begun < 30
    assert ended.returncode == int(sentences[0].rpartition(" ")[2])
    assert ended.stderr.startswith(sentences[0].format(ssh=f"{folder}/ssh"))
    assert sentences[1] in ended.stderr
    assert len(ended.stderr.splitlines()) <= 12


def test_folder_that_is_not_there_is_named(folder: Path) -> None:
    (folder / "ssh").write_text(STAND_IN.replace("cd /", f"mv {folder} {folder}-moved\ncd /"))
    ended = run(folder, str(folder / "facts.py"), hosts="far")
    assert f"there is no folder {folder} on this host, where the ranks should run" in ended.stderr
    assert ended.returncode == 1


GREETING = "echo Welcome; echo; printf 'to %s' $1; "
RANK = "import os\nprint(os.environ['RANK'])\n"


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("leaves", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_what_a_remote_shell_prints_is_shown_and_does_no_harm(folder: Path, leaves: bool) -> None:
    (folder / "rank.py").write_text(RANK)
    shell = STAND_IN.replace("cd /", GREETING + "cd /")
    if leaves:
        # As of `.bash_logout`.
        shell = shell.replace("exec env", "env") + "echo This is the end of the session.\n"
    (folder / "ssh").write_text(shell)
    ended = run(folder, "rank.py", hosts="far:2")
    assert ended.stderr.splitlines() == ["far: Welcome", "far: to far"]
    assert (ended.returncode, sorted(ended.stdout.splitlines())) == (0, ["[0] 0", "[1] 1"])


def test_last_words_of_a_remote_shell_are_shown(folder: Path) -> None:
    (folder / "ssh").write_text(STAND_IN.replace("cd /", GREETING + "echo ', which is closed'; exit 3"))
    ended = run(folder, "facts.py", hosts="far:2")
    lost = f"host far, with ranks 0 to 1 of 2, has started none of them: {folder}/ssh ended with exit status 3"
    assert ended.stderr.splitlines()[:3] == ["far: Welcome", "far: to far, which is closed", lost]
    assert ended.returncode == 3


# -- two hosts -------------------------------------------------------------------------------------
TRAIN = """
import os, sys, time
import torch
import unisono as un

with un.init(timeout=60) as comm:
    total = torch.full((1000,), float(comm.rank))
    comm.all_reduce(total)
    print(comm.backend, comm.hosts, total.unique().tolist(), os.environ.get("UNISONO_INTERFACE"), flush=True)
    if sys.argv[1:] == ["wait"]:
        open(f"ready-{comm.rank}", "w").write(f"{os.getpid()} {os.getpid()} {os.getppid()}")
        os.rename(f"ready-{comm.rank}", f"pids-{comm.rank}")
        while True:
            comm.all_reduce(total)
"""


# What ranks need to communicate, without torch, which each host would import.
MEET = """
import os
from unisono.bootstrap import find
from unisono.core.group import Group

place = find(timeout_s=60.0)
ranks = place.control.exchange(Group.world(place.rank, place.size, place.name), "x", place.rank, 60.0)
print(ranks, place.address, os.environ.get("UNISONO_INTERFACE"))
place.close()
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    reason = obstacle()
    if reason is not None:
        pytest.skip(reason)
    with Network(2) as made:
        yield made


@pytest.fixture(params=["stand-in", pytest.param("sshd", marks=pytest.mark.soak)])
def across(request: pytest.FixtureRequest, network: Network, folder: Path) -> Iterator[Callable[..., list[str]]]:
    """The command that runs two ranks on each host, from the first one."""
    (folder / "train.py").write_text(TRAIN)
    (folder / "meet.py").write_text(MEET)
    if request.param == "stand-in":
        (folder / "ssh").write_text(STAND_IN.replace("exec", f"exec ip netns exec {network.name(1)}"))
        ssh, daemon = f"{folder}/ssh", None
    else:
        ssh, daemon = secure_shell(network, folder)
    hosts = ",".join(f"{address}:2" for address in network.addresses)
    yield lambda *words: network.command(0, *RUN, "--ssh", ssh, "--hosts", hosts, *words)
    if daemon is not None:
        daemon.kill()
        daemon.communicate(timeout=300)


def secure_shell(network: Network, folder: Path) -> tuple[str, subprocess.Popen[bytes]]:
    """Start sshd on the second host; return the command that reaches it, and the daemon."""
    sshd, ssh, keygen = map(shutil.which, ("sshd", "ssh", "ssh-keygen"))
    if not (sshd and ssh and keygen):
        pytest.skip("sshd, ssh and ssh-keygen of OpenSSH are needed")
    for key in ("host", "user"):
        subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    (folder / "authorized").write_text((folder / "user.pub").read_text())
    Path("/run/sshd").mkdir(exist_ok=True)
    settings = {
        "Port": "2222",
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "authorized",
        "StrictModes": "no",
        "UsePAM": "no",
        "PidFile": "none",
    }
    (folder / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    line = network.command(1, sshd, "-D", "-e", "-f", str(folder / "sshd_config"))
    daemon = subprocess.Popen(line, stderr=subprocess.PIPE)
    assert daemon.stderr is not None
    assert any(b"Server listening" in line for line in iter(daemon.stderr.readline, b""))
    known = f"-o UserKnownHostsFile={folder}/known -o StrictHostKeyChecking=no"
    return f"{ssh} -F none -p 2222 -i {folder}/user -o BatchMode=yes {known}", daemon


@pytest.mark.usefixtures("light")
def test_ranks_of_two_hosts_meet(across: Callable[..., list[str]], network: Network) -> None:
    environment = {**os.environ, "UNISONO_INTERFACE": "eth0"}
    line = across("--start", "fork", "meet.py")
    ended = subprocess.run(line, check=False, capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 0, ended.stderr
    expected = [f"[{rank}] [0, 1, 2, 3] {network.addresses[rank // 2]} eth0" for rank in range(4)]
    assert sorted(ended.stdout.splitlines()) == expected


@pytest.mark.soak
@pytest.mark.parametrize("how", ["plain", "fork"])
def test_sums_of_two_hosts(across: Callable[..., list[str]], how: str) -> None:
    environment = {**os.environ, "UNISONO_INTERFACE": "eth0"}
    line = across("--start", how, "train.py")
    ended = subprocess.run(line, check=False, capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 0, ended.stderr
    expected = [f"[{rank}] shm+tcp ((0, 1), (2, 3)) [6.0] eth0" for rank in range(4)]
    assert sorted(ended.stdout.splitlines()) == expected


@pytest.mark.soak
@pytest.mark.parametrize("how", ["plain", "fork"])
def test_no_host_keeps_ranks_of_a_launcher_that_was_killed(
    start: Start, across: Callable[..., list[str]], folder: Path, how: str
) -> None:
    job, pids, _ = started(start, folder, across("--start", how, "wait.py"))
    running = everything(job, pids)
    job.kill()
    job.communicate(timeout=300)
    assert wait_until(lambda: not any(map(is_running, running)))


@pytest.mark.soak
@pytest.mark.parametrize("end", ["client", "server"])
@pytest.mark.parametrize("across", ["sshd"], indirect=True)
def test_ranks_end_with_the_connection(
    start: Start, across: Callable[..., list[str]], network: Network, folder: Path, end: str
) -> None:
    job, pids, parents = started(start, folder, across("--start", "plain", "--grace", "1", "wait.py"))
    running = everything(job, pids)
    if end == "client":
        (process,) = [pid for pid, name, parent in processes() if (name, parent) == ("ssh", job.pid)]
    else:
        # The agent is a child of the shell that its session started, or of the session itself.
        parent_of = {pid: parent for pid, _, parent in processes()}
        names = {pid: name for pid, name, _ in processes()}
        process = parent_of[parents[2]]
        while names[process] != "sshd":
            process = parent_of[process]
    os.kill(process, signal.SIGKILL)
    assert wait_until(lambda: not any(is_running(pid) for rank in (2, 3) for pid in pids[rank]))
    said = job.communicate(timeout=300)[1].splitlines()
    assert f"host {network.addresses[1]}, with ranks 2 to 3 of 4, was lost" in said[0]
    assert wait_until(lambda: not any(map(is_running, running)))


def processes() -> list[tuple[int, str, int]]:
    """Return number, name and parent of each process."""
    lines = subprocess.run(["ps", "-eo", "pid=,comm=,ppid="], capture_output=True, text=True, check=True).stdout
    return [(int(words[0]), words[1], int(words[-1])) for words in map(str.split, lines.splitlines())]


@pytest.mark.soak
def test_death_of_a_host_is_named(
    start: Start, across: Callable[..., list[str]], network: Network, folder: Path
) -> None:
    job, pids, _ = started(start, folder, across("--start", "plain", "train.py", "wait"))
    running = everything(job, pids)
    host = subprocess.run(["ip", "netns", "pids", network.name(1)], capture_output=True, text=True, check=True)
    dead = [int(pid) for pid in host.stdout.split()]
    assert {*pids[2], *pids[3]} <= {*dead}
    for pid in dead:
        os.kill(pid, signal.SIGKILL)
    said = job.communicate(timeout=300)[1].splitlines()
    assert f"host {network.addresses[1]}, with ranks 2 to 3 of 4, was lost" in said[0]
    assert len(said) <= 12
    assert wait_until(lambda: not any(map(is_running, running)))
