"""NUMA nodes of this host, and the processors that each of its ranks is placed on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

__all__ = ["BOUND", "Binding", "bind", "nodes", "parse_cpus", "placement", "shown"]

Binding = Literal["none", "numa", "core"]

BOUND = "UNISONO_CPUS"
"""The variable by which `unisono run` passes a rank its processors, such as "0-3,8"."""

_SYSTEM = Path("/sys/devices/system")


def nodes() -> dict[int, tuple[int, ...]]:
    """Return the processors of each NUMA node that this process may use, threads of one core side by side.

    A host that does not list its nodes is one node, with number 0.

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

    Consecutive ranks share a node, so that the stages of a pipeline pass most messages inside one.

    Args:
        ranks: Number of ranks on this host.
        binding: "numa" gives a rank all processors of its node, "core" an equal share of them, or one that it shares
            where there are more ranks than processors; "none" gives all processors of all nodes.

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
            # With more ranks than processors, several ranks start at the same one.
            placed.append(cpus[first : max(last, first + 1)])
    return placed


def bind() -> None:
    """Bind this process to the processors that UNISONO_CPUS lists, if it is set."""
    if cpus := parse_cpus(os.environ.get(BOUND, "")):
        os.sched_setaffinity(0, cpus)


def parse_cpus(text: str) -> set[int]:
    """Return the processors of a list in Linux's notation.

    Example:
        >>> sorted(parse_cpus("0-2,8"))
        [0, 1, 2, 8]
    """
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def shown(cpus: tuple[int, ...]) -> str:
    """Return a list of processors in Linux's notation.

    Example:
        >>> shown((0, 1, 2, 8))
        '0-2,8'
    """
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][1] == cpu - 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


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
