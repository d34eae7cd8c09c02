"""Ranks that mpirun starts: they have MPI's world, and meet as unisono's by a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from unisono.errors import CommError
from unisono.launching.mpirun import running
from unisono.mpilib import find_mpirun

__all__ = ["JOB", "RESULT", "run_under_mpi"]

JOB, RESULT = "job", "result"
"""Files in the ranks' folder."""

# Not imported here, for the ranks run it as their main module.
_RANK = "unisono.bench.mpi_rank"


def run_under_mpi(folder: Path, ranks: int, limit_s: float) -> None:
    """Have that many ranks of this host do the job in a folder, and leave the result there; they print as this does.

    Raises:
        CommError: It failed, or took longer than `limit_s`.
    """
    mpirun = find_mpirun()
    assert mpirun is not None
    # A rank that is bound to a processor would bind the threads of all contenders to it.
    options = ["--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
    command = [mpirun, "-n", str(ranks), *options, sys.executable, "-m", _RANK, str(folder)]
    with running(command, ranks, OMP_NUM_THREADS="1") as process:
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise CommError(f"the ranks under mpirun had not ended after {limit_s:.0f} s, and were ended") from None
    if status:
        raise CommError(f"mpirun ended with status {status}; what the ranks printed says why")
