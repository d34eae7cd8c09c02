"""Whether what the launcher has set makes sense, together and with the backend."""

from __future__ import annotations

import os
from collections.abc import Iterator

from unisono.doctor.finding import Finding, cross, note, tick
from unisono.doctor.launched import Launched, launched, number
from unisono.doctor.network import addresses
from unisono.doctor.patient import Patient
from unisono.hosts import is_loopback

__all__ = ["ORDER", "check"]

ORDER = 60
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS")
_UNSET = "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"


def check(patient: Patient) -> Iterator[Finding]:
    """Read the environment as `init` would."""
    launch = launched()
    crosses = [*_numbers(), *_pairs(), *_master(launch), *_backend(patient, launch)]
    yield from crosses
    if not crosses:
        yield tick(_words(launch))
    yield from _remarks(patient, launch)


def _numbers() -> Iterator[Finding]:
    for name in _NUMBERS:
        if os.environ.get(name) and number(name) is None:
            yield cross(f"{name} is {os.environ[name]!r}, which is no number", f"unset {name}")
    rank, size = number("RANK"), number("WORLD_SIZE")
    if rank is not None and size is not None and not rank < size:
        yield cross(f"RANK {rank} is not among 0 to {size - 1}, the ranks of WORLD_SIZE {size}", _UNSET)


def _pairs() -> Iterator[Finding]:
    there = [name for name in ("RANK", "WORLD_SIZE") if os.environ.get(name)]
    if len(there) == 1:
        missing = "WORLD_SIZE" if there == ["RANK"] else "RANK"
        yield cross(
            f"{there[0]} is set ({os.environ[there[0]]}) but {missing} is not: init() ends in an error",
            f"{_UNSET}   # for a world of one; or start with: torchrun --nproc-per-node 2 train.py",
        )
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")):
        if len(there) == 2 and not os.environ.get(name):
            yield cross(
                f"RANK and WORLD_SIZE are set but {name} is not: the ranks do not know where to meet",
                f"export {name}={value}   # of the host of rank 0, the same on every rank",
            )


def _master(launch: Launched) -> Iterator[Finding]:
    host = os.environ.get("MASTER_ADDR")
    if not host:
        return
    found = addresses(host)
    several = launch.size is not None and launch.local_size is not None and launch.local_size < launch.size
    if not found:
        yield cross(f"MASTER_ADDR {host} leads to no address", f"getent hosts {host}   # then export MASTER_ADDR=...")
    elif several and all(map(is_loopback, found)):
        yield cross(
            f"MASTER_ADDR {host} is the loopback, but only {launch.local_size} of {launch.size} ranks are on this "
            "host: the others would look for rank 0 on their own",
            "export MASTER_ADDR=ADDRESS   # of the host of rank 0; under torchrun: --master-addr ADDRESS",
        )


def _backend(patient: Patient, launch: Launched) -> Iterator[Finding]:
    if "mpi" in (patient.backend or "").split("+") and launch.by in ("torchrun", "the environment"):
        yield cross(
            f"backend mpi was asked for, but {launch.by} has started the ranks: MPI knows nothing of them, and would "
            "be a world of one in each",
            f"mpirun -n {launch.size or 2} python train.py   # or keep {launch.by}, and say un.init('gloo')",
        )


def _words(launch: Launched) -> str:
    if launch.by is None:
        return "none: un.init() is a world of one, and un.launch starts ranks itself"
    return f"{launch.by}: rank {launch.rank} of {launch.size}"


def _remarks(patient: Patient, launch: Launched) -> Iterator[Finding]:
    if launch.by == "torchrun" and patient.backend is None:
        yield note("under torchrun every backend but mpi can be used; ranks for mpi are started by mpirun")
    if launch.by is None and "SLURM_JOB_ID" in os.environ:
        yield note(
            f"Slurm job {os.environ['SLURM_JOB_ID']} runs no step here, so this is a world of one",
            "srun python train.py",
        )
    several = launch.size is not None and launch.local_size is not None and launch.local_size < launch.size
    if (several or patient.hosts) and not os.environ.get("UNISONO_SECRET"):
        yield note(
            "UNISONO_SECRET is not set: the ranks of several hosts know each other only if the hosts share your home",
            "export UNISONO_SECRET=$(openssl rand -hex 32)   # once; then the same on every host",
        )
