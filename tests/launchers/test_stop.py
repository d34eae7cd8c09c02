"""Signals at random times to random ranks, or to the launcher, of jobs that resume after each: none loses a step.

Each job trains from the last checkpoint until it is stopped. Its ranks print where they have stopped and what weights
they have; these are computed here too, as those of a run that was never stopped.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from fault_jobs import environment

import unisono as un
from unisono.host.mpi_library import find_mpirun

SAVED, UNSAVED = 75, 74

PROGRAM = """
import os, signal, sys
import torch
import unisono as un

kind, folder = sys.argv[1:]
torch.set_num_threads(1)
{begin}
weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
{wrap}
state = dict(weight=weight, step=0)
un.stop.enable(comm, [signal.SIGTERM, signal.SIGUSR1])
with un.checkpoint.Checkpointer(folder, comm, every=7, save_on_stop=True) as checkpointer:
    done = checkpointer.load(state) or 0
    os.write(1, f"rank {{comm.rank}} is {{os.getpid()}}\\n".encode())
    for step in un.stop.batches(comm, range(done + 1, 10**9)):
        weight.grad = None
        (model() * (comm.rank + 1) * step).sum().backward()
        with torch.no_grad():
            weight -= weight.grad
        state["step"] = step
        checkpointer.step(step, state)
os.write(1, f"stopped {{comm.rank}} of {{comm.size}} at {{step}}: {{weight.tolist()}}\\n".encode())
status = un.stop.exit_status(comm)
comm.close()
{end}
sys.exit(status)
"""
PLAIN = {
    "begin": "comm = un.init(kind)",
    "wrap": "un.GradientAverager([weight], comm)\nmodel = lambda: weight",
    "end": "",
}
DDP = {
    "begin": "import torch.distributed as dist\n"
    "dist.init_process_group('unisono')\ncomm = un.Communicator.from_group()",
    "wrap": "class Model(torch.nn.Module):\n"
    "    def __init__(self):\n        super().__init__()\n        self.weight = weight\n"
    "    def forward(self):\n        return self.weight.clone()\n"
    "model = torch.nn.parallel.DistributedDataParallel(Model())",
    "end": "dist.destroy_process_group()",
}

RUN = [sys.executable, "-m", "unisono", "run", "--grace", "60", "-n"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
MPIRUN = [str(find_mpirun()), "-n"]

JOBS = {
    "shm": (RUN, PLAIN, "shm", (SAVED,)),
    "tcp": (RUN, PLAIN, "tcp", (SAVED,)),
    "gloo": (RUN, PLAIN, "gloo", (SAVED,)),
    "ddp": (RUN, DDP, "unisono", (SAVED,)),
    "torchrun": (TORCHRUN, PLAIN, "shm", (1,)),
    "mpirun": (MPIRUN, PLAIN, "shm", (SAVED,)),
    "mpi": (MPIRUN, PLAIN, "mpi", (SAVED,)),
}
"""Command of the launcher, the program's kind, its backend, and the launcher's statuses after a stop."""

_STARTED = re.compile(rb"rank (\d+) is (\d+)")
_STOPPED = re.compile(r"stopped (\d+) of (\d+) at (\d+): (\[.*?\])")


def stopped_job(
    command: list[str], size: int, chance: random.Random, number: int, *, to_launcher: bool
) -> tuple[int, str]:
    """Start a job, send it a signal at a random time, and return its exit status and output."""
    variables = environment() | {"UNISONO_TIMEOUT": "60"}
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=variables, start_new_session=True
    )
    assert job.stdout is not None
    said = b""
    with job, suppress(subprocess.TimeoutExpired):
        try:
            while len(ranks := dict(_STARTED.findall(said))) < size and (line := job.stdout.readline()):
                said += line
            if len(ranks) == size:
                with suppress(subprocess.TimeoutExpired):
                    job.wait(chance.random() * 0.5)
                who = job.pid if to_launcher else int(chance.choice(sorted(ranks.values())))
                os.kill(who, number)
            said += job.communicate(timeout=120)[0]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
    return job.returncode, said.decode()


def check_stops(name: str, sizes: list[int], folder: Path) -> list[int]:
    """Stop a job again and again. Return the exit statuses of its launcher."""
    launcher, parts, kind, statuses = JOBS[name]
    (folder / "program.py").write_text(PROGRAM.format(**parts))
    chance = random.Random(name)
    before = total = 0.0
    found = []
    for turn, size in enumerate(sizes):
        to_launcher = turn % 2 == 1
        number = chance.choice([signal.SIGTERM, signal.SIGUSR1])
        if to_launcher and launcher is not RUN:
            # Open MPI kills its ranks soon after SIGTERM; torchrun passes no SIGUSR1 on.
            number = signal.SIGUSR1 if launcher is MPIRUN else signal.SIGTERM
        command = [*launcher, str(size), str(folder / "program.py"), kind, str(folder / "saved")]
        if launcher is MPIRUN:
            command.insert(-3, sys.executable)
        status, said = stopped_job(command, size, chance, number, to_launcher=to_launcher)
        ends = _STOPPED.findall(said)
        assert sorted(int(rank) for rank, *_ in ends) == [*range(size)], (turn, to_launcher, number, status, said)
        assert len({step for _, _, step, _ in ends}) == 1, said
        step = int(ends[0][2])
        # Every number of ranks is a power of two here, so that no order of the sums changes a bit.
        total -= (1 + size) / 2 * sum(range(int(before) + 1, step + 1))
        assert {weights for *_, weights in ends} == {str([total] * 3)}, said
        assert un.checkpoint.verify(folder / "saved" / f"step-{step:010d}")
        assert status in statuses, (turn, to_launcher, number, status, said)
        found.append(status)
        before = step
    return found


@pytest.mark.soak
@pytest.mark.parametrize("name", JOBS)
def test_jobs_lose_no_step_by_signals(name: str, tmp_path: Path) -> None:
    if JOBS[name][0] is MPIRUN and find_mpirun() is None:
        pytest.skip("there is no mpirun")
    # 315 signals in all, and 700 in tests/unit/elastic/test_stop.py.
    check_stops(name, [2, 2, 4, 2, 2] * 9, tmp_path)
