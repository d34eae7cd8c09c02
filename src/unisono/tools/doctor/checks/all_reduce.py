"""Check that two ranks on this host compute a correct all_reduce with each available transport."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from unisono.host.mpi_library import find_mpirun
from unisono.host.network import why_no_shm
from unisono.tools.doctor.checks.mpi import find_library, mpi_environment
from unisono.tools.doctor.checks.torch import load_torch
from unisono.tools.doctor.examination import Finding, Target, info
from unisono.tools.doctor.smoke_test_runner import tried

__all__ = ["ORDER", "check"]

ORDER = 70
# Cores per trial, for two ranks and their launcher; with fewer cores, the measured times would be meaningless.
_CORES_EACH = 4

_Trial = Callable[[float], list[Finding]]


def check(target: Target) -> Iterator[Finding]:
    """Run two ranks in separate processes for each transport."""
    trials: list[_Trial] = [partial(_launched, target)]
    if target.wants("mpi"):
        trials.append(_mpi)
    deadline = time.monotonic() + target.limit_s
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // _CORES_EACH)) as pool:
        for found in pool.map(lambda trial: trial(max(1.0, deadline - time.monotonic())), trials):
            yield from found


def _launched(target: Target, limit_s: float) -> list[Finding]:
    """Check all transports except MPI, whose ranks mpirun must start."""
    obstacles = {"thread": None, "shm": why_no_shm(), "gloo": None, "nccl": _no_nccl()}
    wanted = {name: obstacle for name, obstacle in obstacles.items() if target.wants(name)}
    fixes = {
        name: f"unisono doctor all_reduce --backend {name} --timeout 300"
        for name, obstacle in wanted.items()
        if obstacle is None
    }
    # Mention an unavailable backend only if the user requested it; otherwise, the backend's own check reports it.
    remarks = [
        info(f"{name}: not tried, {obstacle}")
        for name, obstacle in wanted.items()
        if obstacle is not None and target.requires(name)
    ]
    return (tried(fixes, limit_s) if fixes else []) + remarks


def _no_nccl() -> str | None:
    count = load_torch().cuda.device_count()
    return None if count >= 2 else f"because it needs a GPU for each rank, and there is {count or 'none'}"


def _mpi(limit_s: float) -> list[Finding]:
    library = find_library(limit_s)
    if isinstance(library, str):
        return []
    starter = find_mpirun()
    if starter is None:
        return []
    fix = f"{starter} -n 2 {sys.executable} -m unisono.tools.doctor.smoke_test_runner mpi"
    return tried({"mpi": fix}, limit_s, before=[starter, "-n", "2"], environment=mpi_environment())
