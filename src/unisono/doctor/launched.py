"""Which launcher has started this process, and what it says of ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass

from unisono import mpilib
from unisono.doctor.loading import load_torch

__all__ = ["Launched", "launched", "number"]


@dataclass(frozen=True, slots=True)
class Launched:
    """What the environment says. Numbers that it does not say, or that are none, are None.

    Attributes:
        by: "torchrun", "Slurm", what MPI's launcher is called, "the environment" (RANK or WORLD_SIZE), or None.
        rank, size: In the world.
        local_rank, local_size: On this host.
        binds: Whether the launcher gives each rank cores of its own.
    """

    by: str | None
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    binds: bool = False

    @property
    def ranks_here(self) -> int | None:
        """How many ranks this host has; all of them, if nothing tells them apart."""
        return self.size if self.local_size is None else self.local_size


def launched() -> Launched:
    """In the order in which `init` asks: torchrun and the environment, MPI, Slurm."""
    if os.environ.get("RANK") or os.environ.get("WORLD_SIZE"):
        by = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "the environment"
        return Launched(
            by, number("RANK"), number("WORLD_SIZE"), number("LOCAL_RANK"), number("LOCAL_WORLD_SIZE"), binds=False
        )
    by_mpi = mpilib.launched()
    if by_mpi is not None:
        local_rank, local_size = (_first(names) for names in _LOCAL)
        return Launched(by_mpi.by, by_mpi.rank, by_mpi.size, local_rank, local_size, binds=True)
    if not {"SLURM_JOB_ID", "SLURM_PROCID"} & os.environ.keys():
        return Launched(None)
    try:
        # Not above: it brings torch along, of which most checks know nothing, and which may be what is broken.
        load_torch()
        from unisono.bootstrap.slurm import step

        task = step()
    except (ValueError, ImportError, OSError):
        return Launched("Slurm", number("SLURM_PROCID"), number("SLURM_NTASKS"), binds=True)
    if task is None:
        return Launched(None)
    local_size = task.size if len(task.nodes) <= 1 else _tasks_here()
    return Launched("Slurm", task.rank, task.size, task.local_rank, local_size, binds=True)


# Rank and size on the host, as the launchers of Open MPI, MVAPICH and MPICH say it.
_LOCAL = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
)


def _first(names: tuple[str, ...]) -> int | None:
    return next((value for value in map(number, names) if value is not None), None)


def _tasks_here() -> int | None:
    """SLURM_GTIDS lists the ranks of this node."""
    tasks = os.environ.get("SLURM_GTIDS")
    return len(tasks.split(",")) if tasks else None


def number(name: str) -> int | None:
    """A variable that is a number; None if it is not."""
    text = os.environ.get(name, "").strip()
    return int(text) if text.isdecimal() else None
