"""Show the NUMA nodes of this host, and the node on which each rank is placed if ranks are bound to nodes."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.host.processors import nodes, placement, shown
from unisono.tools.doctor.checks.cores import ranks_here
from unisono.tools.doctor.examination import Finding, Target, info, ok

__all__ = ["ORDER", "check"]

ORDER = 42


def check(target: Target) -> Iterator[Finding]:
    """List the nodes that have cores for this process."""
    found = nodes()
    listed = "; ".join(f"node {node} has CPUs {shown(cpus)}" for node, cpus in found.items())
    if len(found) == 1:
        yield ok(f"{listed}, and is the only one with cores for this process")
        return
    ranks = ranks_here(target)
    placed = [] if ranks is None else placement(ranks, "numa")
    on = {node: tuple(rank for rank, its in enumerate(placed) if its == cpus) for node, cpus in found.items()}
    where = "".join(f"; rank(s) {shown(its)} on node {node}" for node, its in on.items() if its)
    yield info(f"{listed}. Ranks are not bound unless you ask for it{where}", "unisono run --bind-to numa")
