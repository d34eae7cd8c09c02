"""Whether there are cores enough for the ranks of this host, and for their threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from unisono.doctor.finding import Finding, cross, note, tick
from unisono.doctor.launched import Launched, launched, number
from unisono.doctor.patient import Patient

__all__ = ["ORDER", "check"]

ORDER = 40


def check(patient: Patient) -> Iterator[Finding]:
    """Count them: what the process may run on, and what its control group is allowed."""
    launch = launched()
    cores, why = _cores(launch)
    ranks = patient.ranks if patient.ranks is not None else launch.ranks_here
    if ranks is None:
        yield tick(f"{cores} {why}")
        return
    if ranks > cores:
        by = f" by {launch.by}" if patient.ranks is None and launch.by else ""
        yield cross(
            f"{ranks} ranks on this host{by}, more ranks than cores ({cores} {why}): they take turns, each wait costs "
            "milliseconds, and all get slower",
            f"torchrun --nproc-per-node {cores} train.py   # no more than {cores} rank(s) on this host",
        )
        return
    yield tick(f"{cores} {why}, for {ranks} rank(s)")
    threads = number("OMP_NUM_THREADS")
    share = max(1, cores // ranks)
    if threads is not None and threads * ranks > cores:
        yield cross(
            f"{ranks} ranks with OMP_NUM_THREADS={threads} are more threads than cores ({cores})",
            f"export OMP_NUM_THREADS={share}",
        )
    elif threads is None and ranks > 1 and not launch.binds:
        yield note("OMP_NUM_THREADS is not set: each rank may take all cores", f"export OMP_NUM_THREADS={share}")


def _cores(launch: Launched) -> tuple[int, str]:
    """How many, and what they are called."""
    if launch.binds or not hasattr(os, "sched_getaffinity"):
        # What this rank is bound to says nothing of what all ranks together have.
        cores, why = os.cpu_count() or 1, "core(s)"
    else:
        cores, why = len(os.sched_getaffinity(0)), "core(s)"
        if cores < (os.cpu_count() or 1):
            why = f"of {os.cpu_count()} cores are allowed to this process"
    quota = _quota()
    if quota is not None and quota < cores:
        return max(1, round(quota)), f"core(s) are what the control group allows of {cores}"
    return cores, why


def _quota() -> float | None:
    """Of cgroup v2, then v1; as a number of cores. None if there is no limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            limit = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text().strip()
            period = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not (limit.isdecimal() and period.isdecimal() and int(period)):
        return None
    return int(limit) / int(period)
