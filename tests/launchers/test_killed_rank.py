"""`kill -9` of a rank, by every launcher: the job ends within 10 s, names that rank, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launcher_helpers import expect, task

Start = Callable[..., "subprocess.Popen[str]"]

WITHIN_S = 10.0

# Reduces until a file tells it to stop, and prints the process of each rank.
PROGRAM = """
import itertools, os, sys, time
from pathlib import Path

folder, backend, launch = Path(sys.argv[1]), sys.argv[2], len(sys.argv) > 3
attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
(folder / f"began {attempt} {os.environ.get('RANK', '0')}").touch()

import torch
import unisono as un

def work(comm):
    for step in itertools.count():
        enough = torch.full((1000,), float((folder / "enough").exists()))
        comm.all_reduce(enough, "max")
        if step == 3:
            (folder / f"new {comm.rank}").write_text(str(os.getpid()))
            (folder / f"new {comm.rank}").rename(folder / f"pid {attempt} {comm.rank}")
        if enough[0]:
            return
        time.sleep(0.01)

if __name__ == "__main__":
    if launch:
        un.launch(work, 2, backend)
    else:
        with un.init(backend) as comm:
            work(comm)
"""

# Two processes that no parent watches. This one has imported torch for both, and only tells how they have ended.
FORKS = """
import json, os, runpy, sys
import unisono.launcher.preload

pids = []
for variables in json.loads(sys.argv[1]):
    pids.append(os.fork())
    if not pids[-1]:
        os.environ.update(variables)
        sys.argv = sys.argv[2:]
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))
"""


class Job:
    """Two ranks of the program, started by some launcher."""

    def __init__(self, start: Start, folder: Path) -> None:
        self._start, self._folder = start, folder
        (folder / "program.py").write_text(PROGRAM)
        self.processes: list[subprocess.Popen[str]] = []
        self.pids: list[int] = []
        self.said = ""

    def start(
        self, *launcher: str, backend: str, last: tuple[str, ...] = (), env: dict[str, str] | None = None
    ) -> None:
        command = [*launcher, self._folder / "program.py", self._folder, backend, *last]
        self.processes.append(self._start(command, env))

    def kill(self, rank: int, attempt: int = 0) -> None:
        """Kill this rank as soon as all ranks work."""
        paths = [self._folder / f"pid {attempt} {each}" for each in range(2)]
        expect(lambda: all(path.exists() for path in paths) or self._over(), "both ranks work", 60.0)
        assert not self._over(), self._words()
        now = [int(path.read_text()) for path in paths]
        self.pids += now
        os.kill(now[rank], signal.SIGKILL)

    def began(self, rank: int, attempt: int) -> bool:
        return (self._folder / f"began {attempt} {rank}").exists()

    def _over(self) -> bool:
        return any(process.poll() is not None for process in self.processes)

    def _words(self) -> list[tuple[str, str]]:
        return [process.communicate(timeout=300) for process in self.processes]

    def enough(self) -> None:
        (self._folder / "enough").touch()

    def end(self, within_s: float = WITHIN_S) -> list[int]:
        """Wait for the end, for so long as it may take; the exit statuses."""
        began = time.monotonic()
        said = [process.communicate(timeout=within_s + 20) for process in self.processes]
        took_s = time.monotonic() - began
        self.said = "\n".join(err + out for out, err in said)
        assert took_s < within_s, f"took {took_s:.1f} s\n{self.said}"
        expect(lambda: not self._left(), f"{self._left()} are left", within_s - took_s)
        return [process.returncode for process in self.processes]

    def _left(self) -> list[int]:
        """Ranks, and all that their launchers have started, that still run."""
        sessions = {process.pid for process in self.processes}
        left = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            state, session = words[0], int(words[3])
            if state != "Z" and (session in sessions or int(folder.name) in self.pids):
                left.append(int(folder.name))
        return left

    def first_named(self) -> int:
        """The rank that the first error of all is about; where it happened, "rank 0 of 2, ...", is no blame."""
        text = re.sub(r"\[rank \d of 2\]|rank \d of 2(, [^:\n]*)?:", "", self.said)
        own = r"rank (\d)[^\n]*?(?:was lost|left|ended by|SIGKILL|signal 9)"
        # torchrun may end the others before they have printed anything.
        match = re.search(rf"{own}|\(exitcode: -9\) local_rank: (\d)", text)
        assert match, self.said
        return int(match[1] or match[2])


@pytest.fixture
def job(start: Start, tmp_path: Path) -> Job:
    return Job(start, tmp_path)


@pytest.mark.parametrize(
    ("backend", "killed"),
    [
        ("shm", 1),
        pytest.param("gloo", 0, marks=pytest.mark.soak),
        pytest.param("gloo", 1, marks=pytest.mark.soak),
        pytest.param("shm", 0, marks=pytest.mark.soak),
    ],
)
def test_slurm(job: Job, backend: str, killed: int, tmp_path: Path) -> None:
    """Ranks as under srun: separate processes without a parent that watches them."""
    (tmp_path / "forks.py").write_text(FORKS)
    tasks = [task(rank, 2, SLURM_JOB_ID=str(os.getpid())) for rank in range(2)]
    job.start(sys.executable, str(tmp_path / "forks.py"), json.dumps(tasks), backend=backend)
    job.kill(killed)
    assert job.end() == [0]
    statuses = json.loads(job.said.splitlines()[-1])
    assert statuses[killed] == -signal.SIGKILL
    assert statuses[1 - killed] not in (0, None)
    assert job.first_named() == killed
    assert "PeerLostError" in job.said


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("killed", [0, 1])
def test_launch(job: Job, backend: str, killed: int) -> None:
    job.start(sys.executable, backend=backend, last=("launch",))
    job.kill(killed)
    assert job.end() == [1]
    assert job.first_named() == killed
    assert f"PeerLostError: rank {killed} of 2 was ended by SIGKILL" in job.said


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("killed", [0, 1])
def test_torchrun(job: Job, backend: str, killed: int) -> None:
    job.start(*TORCHRUN, backend=backend)
    job.kill(killed)
    assert job.end() == [1]
    assert job.first_named() == killed
    assert re.search(rf"rank +: {killed} .*\n *exitcode *: -9", job.said), job.said


@pytest.mark.soak
def test_torchrun_restarts_ranks(job: Job) -> None:
    job.start(*TORCHRUN, "--max-restarts", "1", backend="gloo")
    job.kill(1)
    expect(lambda: all(job.began(rank, attempt=1) for rank in range(2)), "both were restarted", WITHIN_S)
    job.kill(0, attempt=1)
    assert job.end() == [1]
    assert job.first_named() == 1


@pytest.mark.soak
def test_torchrun_restarts_ranks_and_training_resumes(job: Job) -> None:
    job.start(*TORCHRUN, "--max-restarts", "1", backend="shm")
    job.kill(0)
    job.enough()
    expect(lambda: all(job.began(rank, attempt=1) for rank in range(2)), "both were restarted", WITHIN_S)
    # They have to start and meet before they see that it is enough.
    assert job.end(within_s=60.0) == [0]


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["mpi", "gloo", "shm"])
@pytest.mark.parametrize("killed", [0, 1])
def test_mpirun(job: Job, backend: str, killed: int) -> None:
    from unisono.transports import TRANSPORTS

    if shutil.which("mpirun") is None or "mpi" not in TRANSPORTS:
        pytest.skip("there is no mpirun here; `unisono doctor` says how to get it")
    env = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    job.start("mpirun", "-n", "2", sys.executable, backend=backend, env=env)
    job.kill(killed)
    assert job.end() != [0]
    assert job.first_named() == killed
