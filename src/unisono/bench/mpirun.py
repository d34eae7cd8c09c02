"""Ranks that mpirun starts: they have MPI's world, and meet as unisono's by a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from unisono.cores import cores
from unisono.errors import CommError
from unisono.mpilib import find_mpirun

__all__ = ["JOB", "RESULT", "run_under_mpi"]

JOB, RESULT = "job", "result"
"""Files in the ranks' folder."""

# Not imported here, for the ranks run it as their main module.
_RANK = "unisono.bench.mpi_rank"
_END_S = 10.0


def run_under_mpi(folder: Path, ranks: int, limit_s: float) -> None:
    """Have that many ranks of this host do the job in a folder, and leave the result there; they print as this does.

    Raises:
        CommError: It failed, or took longer than `limit_s`.
    """
    mpirun = find_mpirun()
    assert mpirun is not None
    # Nobody is bound to a processor: the others' threads could not leave it either.
    options = ["-n", str(ranks), "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
    crowded = ranks > cores()
    environment = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": str(int(crowded)),
        "OMP_NUM_THREADS": "1",
    }
    command = [mpirun, *options, sys.executable, "-m", _RANK, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        raise CommError(f"the ranks under mpirun had not ended after {limit_s:.0f} s, and were ended") from None
    finally:
        # Asked politely, mpirun ends its ranks.
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if status:
        raise CommError(f"mpirun ended with status {status}; what the ranks printed says why")
