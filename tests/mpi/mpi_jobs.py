"""Starts programs under mpirun, and tells how they ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

from waiting import wait_until

from unisono.host.mpi_library import env_without_launcher, find_mpirun

LIMIT_S = 100.0


@dataclass(frozen=True)
class Ended:
    """Result of a job.

    Attributes:
        status: Of mpirun.
        out, err: What it and its ranks printed.
        seconds: How long it took.
        left: Processes of its session that were still there afterwards.
    """

    status: int
    out: str
    err: str
    seconds: float
    left: list[int]


def mpirun(
    folder: Path, program: str, ranks: int = 2, *, flags: tuple[str, ...] = (), arguments: tuple[str, ...] = ()
) -> Ended:
    """Run a program's text on some ranks of this host."""
    script = folder / "program.py"
    script.write_text("import torch\nimport unisono as un\ntorch.set_num_threads(1)\n" + textwrap.dedent(program))
    launcher = find_mpirun()
    assert launcher is not None
    command = [launcher, *flags, "-n", str(ranks), sys.executable, str(script), *arguments]
    return run(command)


def run(command: list[str], **variables: str) -> Ended:
    """Run a command in a session of its own, as many ranks as it likes on any core."""
    environment = env_without_launcher(os.environ) | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMP_NUM_THREADS": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        **variables,
    }
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        for pid in members(process.pid):
            os.kill(pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"not over after {LIMIT_S} s:\n{out.decode()}\n{err.decode()}") from None
    seconds = time.monotonic() - started
    return Ended(process.returncode, out.decode(), err.decode(), seconds, gone(process.pid))


def members(session: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def gone(session: int, within_s: float = 10.0) -> list[int]:
    """Return the processes of a session that remain after a short time."""
    wait_until(lambda: not members(session), within_s)
    return members(session)
