"""How many processors the ranks of this host have between them: fewer than the machine has, in many a container."""

from __future__ import annotations

import os
from pathlib import Path

from unisono.host import mpi_library

__all__ = ["cores", "quota", "visible"]

_GROUP = Path("/proc/self/cgroup")
_V2 = Path("/sys/fs/cgroup")
_V1 = Path("/sys/fs/cgroup/cpu")


def cores() -> int:
    """What this process may run on, and its control group allows it; at least 1.

    Example:
        >>> 1 <= cores() <= os.cpu_count()
        True
    """
    limit, seen = quota(), visible()
    return seen if limit is None else min(seen, max(1, int(limit)))


def visible() -> int:
    """Processors that this process may run on; where a launcher binds each rank to its own, all of the machine."""
    of_the_machine = os.cpu_count() or 1
    # The script that sbatch runs is no step, and has all that the job has on this host.
    binds = mpi_library.launched() is not None or ("SLURM_STEP_ID" in os.environ and "RANK" not in os.environ)
    if binds or not hasattr(os, "sched_getaffinity"):
        # What this rank is bound to says nothing of what all ranks together have.
        return of_the_machine
    return len(os.sched_getaffinity(0))


def quota() -> float | None:
    """What the control groups of this process allow, as a number of processors. None if there is no limit."""
    of = {name: path for _, names, path in _memberships() for name in names.split(",")}
    # Of version 2, where groups have no name, and of version 1.
    texts = [_said(group / "cpu.max") for group in _upwards(_V2, of.get("", "/"))]
    texts += [
        _said(group / "cpu.cfs_quota_us") + _said(group / "cpu.cfs_period_us")
        for group in _upwards(_V1, of.get("cpu", "/"))
    ]
    limits = [int(words[0]) / int(words[1]) for text in texts if _is_limit(words := text.split())]
    return min(limits, default=None)


def _memberships() -> list[list[str]]:
    return [line.split(":", 2) for line in _said(_GROUP).splitlines() if line.count(":") >= 2]


def _upwards(root: Path, path: str) -> list[Path]:
    """The folders of a group and of all above it."""
    own = root / path.lstrip("/")
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]


def _said(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _is_limit(words: list[str]) -> bool:
    return len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]) > 0
