"""Check that this host has enough cores for its ranks and their threads."""

from __future__ import annotations

import os
from collections.abc import Iterator

from unisono.host.launched import number
from unisono.host.processors import cores, visible
from unisono.tools.doctor.checks.launcher import BY_VARIABLES, launched
from unisono.tools.doctor.examination import Finding, Target, info, ok, problem

__all__ = ["ORDER", "check", "ranks_here"]

ORDER = 40


def check(target: Target) -> Iterator[Finding]:
    """Count the cores that the process's affinity mask and its control group's quota allow."""
    launch = launched()
    count, why = _cores()
    ranks = ranks_here(target)
    if ranks is None:
        yield ok(f"{count} {why}")
        return
    if ranks > count:
        by = f" by {launch.by}" if target.ranks is None and launch.by else ""
        yield problem(
            f"{ranks} ranks on this host{by}, more ranks than cores ({count} {why}): they take turns, each wait "
            "costs milliseconds, and all ranks get slower",
            f"torchrun --nproc-per-node {count} train.py   # at most {count} rank(s) on this host",
        )
        return
    yield ok(f"{count} {why}, for {ranks} rank(s)")
    threads = number("OMP_NUM_THREADS")
    share = max(1, count // ranks)
    if threads is not None and threads * ranks > count:
        yield problem(
            f"{ranks} ranks with OMP_NUM_THREADS={threads} are more threads than cores ({count})",
            f"export OMP_NUM_THREADS={share}",
        )
    elif threads is None and ranks > 1 and launch.by in ("", *BY_VARIABLES):
        yield info("OMP_NUM_THREADS is not set: each rank may take all cores", f"export OMP_NUM_THREADS={share}")


def ranks_here(target: Target) -> int | None:
    """Return the number of ranks on this host, as requested or as started by a launcher; None if unknown."""
    launch = launched()
    return next((count for count in (target.ranks, launch.local_size, launch.size) if count is not None), None)


def _cores() -> tuple[int, str]:
    """Return the number of cores, and their description."""
    count = cores()
    seen = visible()
    of_the_machine = os.cpu_count() or 1
    if count < seen:
        return count, f"core(s) are what the control group allows of {seen}"
    return count, f"of {of_the_machine} cores are allowed to this process" if count < of_the_machine else "core(s)"
