"""Whether there are cores enough for the ranks of this host, and for their threads."""

from __future__ import annotations

import os
from collections.abc import Iterator

from unisono.cores import quota, visible
from unisono.doctor.finding import Finding, cross, note, tick
from unisono.doctor.launched import launched, number
from unisono.doctor.patient import Patient

__all__ = ["ORDER", "check"]

ORDER = 40


def check(patient: Patient) -> Iterator[Finding]:
    """Count them: what the process may run on, and what its control group is allowed."""
    launch = launched()
    cores, why = _cores()
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


def _cores() -> tuple[int, str]:
    """How many, and what they are called."""
    cores, of_the_machine, limit = visible(), os.cpu_count() or 1, quota()
    if limit is not None and limit < cores:
        return max(1, int(limit)), f"core(s) are what the control group allows of {cores}"
    return cores, f"of {of_the_machine} cores are allowed to this process" if cores < of_the_machine else "core(s)"
