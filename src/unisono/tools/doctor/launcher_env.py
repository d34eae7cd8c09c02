"""The launcher that started this process, and its numbers of ranks."""

from __future__ import annotations

import os

from unisono.bootstrap import slurm
from unisono.host import mpi_library
from unisono.host.mpi_library import MpiLauncher, number

__all__ = ["BY_VARIABLES", "launched"]

BY_VARIABLES = ("torchrun", "the environment")
"""Launchers that set RANK and WORLD_SIZE, and bind no rank to cores."""


def launched() -> MpiLauncher:
    """Return the launcher, in the order in which `init` looks: torchrun and the environment, MPI, Slurm.

    Its name is empty if there is none. Numbers that are unset or invalid are None.
    """
    if os.environ.get("RANK") or os.environ.get("WORLD_SIZE"):
        by = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "the environment"
        local = number("LOCAL_RANK"), number("LOCAL_WORLD_SIZE")
        return MpiLauncher(by, number("RANK"), number("WORLD_SIZE"), *local)
    by_mpi = mpi_library.launched()
    if by_mpi is not None:
        return by_mpi
    try:
        task = slurm.step()
    except ValueError:
        return MpiLauncher("Slurm", number("SLURM_PROCID"), number("SLURM_NTASKS"))
    if task is None:
        return MpiLauncher("", None, None)
    return MpiLauncher("Slurm", task.rank, task.size, task.local_rank, task.local_size)
