"""Processors of this host: their number, the time spent waiting for them, NUMA nodes, and the placement of ranks.

A container is often limited to fewer processors than the machine has.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from unisono.host import mpi_library

__all__ = [
    "BOUND",
    "Binding",
    "bind",
    "core_wait_s",
    "cores",
    "model",
    "nodes",
    "parse_cpus",
    "placement",
    "quota",
    "shown",
    "visible",
]

_GROUP = Path("/proc/self/cgroup")
_SCHEDSTAT = Path("/proc/thread-self/schedstat")
_V2 = Path("/sys/fs/cgroup")
_V1 = Path("/sys/fs/cgroup/cpu")


def cores() -> int:
    """Return the number of processors that this process may use, according to its affinity and cgroups; at least 1.

    Example:
        >>> 1 <= cores() <= os.cpu_count()
        True
    """
    limit = quota()
    seen = visible()
    return seen if limit is None else min(seen, max(1, int(limit)))


def core_wait_s() -> float | None:
    """Return how many seconds this thread has been runnable but not running; None if the system does not record this.

    Example:
        >>> (core_wait_s() or 0.0) >= 0.0
        True
    """
    words = _read(_SCHEDSTAT).split()
    return int(words[1]) / 1e9 if len(words) == 3 else None


def model() -> str:
    """Return the name of this host's kind of processor."""
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def visible() -> int:
    """Return the number of processors in this process's affinity mask.

    If the platform has no affinity masks, or if a launcher binds ranks, `visible` returns the machine's number of
    processors: a bound rank's mask lacks the other ranks' processors.
    """
    of_the_machine = os.cpu_count() or 1
    # The script that sbatch runs is not a Slurm step, so it is not bound: it may use all of the job's processors on
    # this host.
    binds = (
        mpi_library.launched() is not None
        or BOUND in os.environ
        or ("SLURM_STEP_ID" in os.environ and "RANK" not in os.environ)
    )
    if binds or not hasattr(os, "sched_getaffinity"):
        # Ignore this rank's binding, which does not include the processors of the other ranks.
        return of_the_machine
    return len(os.sched_getaffinity(0))


def quota() -> float | None:
    """Return the number of processors that this process's cgroups allow; None if there is no limit."""
    memberships = [line.split(":", 2) for line in _read(_GROUP).splitlines() if line.count(":") >= 2]
    of = {name: path for _, names, path in memberships for name in names.split(",")}
    # Read the limits of cgroups version 2, whose hierarchy has an empty name, and of version 1.
    texts = [_read(group / "cpu.max") for group in _upwards(_V2, of.get("", "/"))]
    texts += [
        _read(group / "cpu.cfs_quota_us") + _read(group / "cpu.cfs_period_us")
        for group in _upwards(_V1, of.get("cpu", "/"))
    ]
    # A text such as "max 100000" sets no limit.
    limits = [
        int(words[0]) / int(words[1])
        for text in texts
        if len(words := text.split()) == 2 and all(map(str.isdecimal, words)) and int(words[1]) > 0
    ]
    return min(limits, default=None)


def _upwards(root: Path, path: str) -> list[Path]:
    """Return the folders of a cgroup and of all its ancestors."""
    own = root / path.lstrip("/")
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]


Binding = Literal["none", "numa", "core"]

BOUND = "UNISONO_CPUS"
"""Environment variable in which `unisono run` passes processors to a rank, such as "0-3,8"."""

_SYSTEM = Path("/sys/devices/system")


def nodes() -> dict[int, tuple[int, ...]]:
    """Return the processors that this process may use on each NUMA node; a core's hardware threads are adjacent.

    If the host does not list its NUMA nodes, all processors belong to node 0, in numeric order.

    Example:
        >>> len(nodes()) >= 1 and min(map(len, nodes().values())) >= 1
        True
    """
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:
        allowed = set(range(os.cpu_count() or 1))
    found = {}
    for folder in sorted(_SYSTEM.glob("node/node[0-9]*"), key=_number):
        if cpus := parse_cpus(_read(folder / "cpulist")) & allowed:
            found[_number(folder)] = tuple(sorted(cpus, key=_core))
    return found or {0: tuple(sorted(allowed))}


def placement(ranks: int, binding: Binding) -> list[tuple[int, ...]]:
    """Return the processors of each of this host's ranks.

    Consecutive ranks share a NUMA node, so that most messages between pipeline stages remain inside a node.

    Args:
        ranks: Number of ranks on this host.
        binding: "numa" gives a rank all processors of its NUMA node. "core" gives a rank an equal share of its node's
            processors, or one shared processor if the node has more ranks than processors. "none" gives a rank all
            processors of all nodes.

    Example:
        >>> len(placement(4, "numa"))
        4
    """
    found = list(nodes().values())
    if binding == "none":
        return [tuple(cpu for cpus in found for cpu in cpus)] * ranks
    of = [rank * len(found) // ranks for rank in range(ranks)]
    if binding == "numa":
        return [found[node] for node in of]
    placed = []
    for node, cpus in enumerate(found):
        here = of.count(node)
        for index in range(here):
            first, last = (place * len(cpus) // here for place in (index, index + 1))
            # If there are more ranks than processors, several ranks share a processor.
            placed.append(cpus[first : max(last, first + 1)])
    return placed


def bind() -> None:
    """Bind this process to the processors that UNISONO_CPUS lists, if it is set."""
    if cpus := parse_cpus(os.environ.get(BOUND, "")):
        os.sched_setaffinity(0, cpus)


def parse_cpus(text: str) -> set[int]:
    """Return the set of processors in a list in Linux's notation.

    Example:
        >>> sorted(parse_cpus("0-2,8"))
        [0, 1, 2, 8]
    """
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def shown(numbers: Iterable[int], *, dash: str = "-", comma: str = ",") -> str:
    """Format a list of numbers as ranges; by default, in Linux's notation for processors.

    Args:
        numbers: The numbers, in any order.
        dash, comma: What stands inside and between ranges.

    Example:
        >>> shown((0, 1, 2, 8))
        '0-2,8'
    """
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return comma.join(str(first) if first == last else f"{first}{dash}{last}" for first, last in parts)


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("node"))


def _core(cpu: int) -> tuple[int, int]:
    siblings = parse_cpus(_read(_SYSTEM / f"cpu/cpu{cpu}/topology/thread_siblings_list"))
    return min(siblings, default=cpu), cpu


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
