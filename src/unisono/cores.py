"""How many processors the ranks of this host have between them: fewer than the machine has, in many a container."""

from __future__ import annotations

import os
from pathlib import Path

from unisono import mpilib

__all__ = ["cores", "quota", "visible"]

_V2 = Path("/sys/fs/cgroup/cpu.max")
_V1 = (Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us"))


def cores() -> int:
    """What this process may run on, and its control group allows it; at least 1.

    Example:
        >>> 1 <= cores() <= os.cpu_count()
        True
    """
    limit, seen = quota(), visible()
    return seen if limit is None else min(seen, max(1, round(limit)))


def visible() -> int:
    """Processors that this process may run on; where a launcher binds each rank to its own, all of the machine."""
    of_the_machine = os.cpu_count() or 1
    binds = mpilib.launched() is not None or ("SLURM_PROCID" in os.environ and "RANK" not in os.environ)
    if binds or not hasattr(os, "sched_getaffinity"):
        # What this rank is bound to says nothing of what all ranks together have.
        return of_the_machine
    return len(os.sched_getaffinity(0))


def quota() -> float | None:
    """What the control group allows, of version 2, then 1, as a number of processors. None if there is no limit."""
    try:
        limit, period = _V2.read_text().split()
    except (OSError, ValueError):
        try:
            limit, period = (path.read_text().strip() for path in _V1)
        except OSError:
            return None
    if not (limit.isdecimal() and period.isdecimal() and int(period)):
        return None
    return int(limit) / int(period)
