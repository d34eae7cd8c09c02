"""Processors that the ranks of this host share, in many containers fewer than the machine has, and waits for them."""

from __future__ import annotations

import os
from pathlib import Path

from unisono.host import mpi_library
from unisono.host.numa import BOUND

__all__ = ["core_wait_s", "cores", "quota", "visible"]

_GROUP = Path("/proc/self/cgroup")
_SCHEDSTAT = Path("/proc/thread-self/schedstat")
_V2 = Path("/sys/fs/cgroup")
_V1 = Path("/sys/fs/cgroup/cpu")


def cores() -> int:
    """Return the number of processors that affinity and control groups allow this process; at least 1.

    Example:
        >>> 1 <= cores() <= os.cpu_count()
        True
    """
    limit = quota()
    seen = visible()
    return seen if limit is None else min(seen, max(1, int(limit)))


def core_wait_s() -> float | None:
    """Return how long this thread has waited for a processor while it could run; None where Linux does not count it.

    Example:
        >>> (core_wait_s() or 0.0) >= 0.0
        True
    """
    words = _read(_SCHEDSTAT).split()
    return int(words[1]) / 1e9 if len(words) == 3 else None


def visible() -> int:
    """Return the number of processors in this process's affinity, or in the machine if a launcher binds each rank."""
    of_the_machine = os.cpu_count() or 1
    # The script that sbatch runs is no step, and has all of the job's processors on this host.
    binds = (
        mpi_library.launched() is not None
        or BOUND in os.environ
        or ("SLURM_STEP_ID" in os.environ and "RANK" not in os.environ)
    )
    if binds or not hasattr(os, "sched_getaffinity"):
        # This rank's binding does not show the processors of all ranks together.
        return of_the_machine
    return len(os.sched_getaffinity(0))


def quota() -> float | None:
    """Return the number of processors that this process's control groups allow. None if there is no limit."""
    of = {name: path for _, names, path in _memberships() for name in names.split(",")}
    # Limits of cgroup version 2, where groups have no name, and of version 1.
    texts = [_read(group / "cpu.max") for group in _upwards(_V2, of.get("", "/"))]
    texts += [
        _read(group / "cpu.cfs_quota_us") + _read(group / "cpu.cfs_period_us")
        for group in _upwards(_V1, of.get("cpu", "/"))
    ]
    limits = [int(words[0]) / int(words[1]) for text in texts if _is_limit(words := text.split())]
    return min(limits, default=None)


def _memberships() -> list[list[str]]:
    return [line.split(":", 2) for line in _read(_GROUP).splitlines() if line.count(":") >= 2]


def _upwards(root: Path, path: str) -> list[Path]:
    """Return the folders of a group and of all its ancestors."""
    own = root / path.lstrip("/")
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _is_limit(words: list[str]) -> bool:
    return len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]) > 0
