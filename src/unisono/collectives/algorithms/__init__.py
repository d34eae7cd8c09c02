"""Collective algorithms by name, each a file of pure integers: `algorithms/<collective>/<algorithm>.py`."""

from __future__ import annotations

from unisono.collectives.algorithms.semantics import COLLECTIVES, chunks_of
from unisono.collectives.algorithms.step import Cost, Move, Schedule, Step
from unisono.core.registry import Registry

__all__ = ["COLLECTIVES", "SCHEDULES", "Cost", "Move", "Schedule", "Step", "chunks_of"]

SCHEDULES: dict[str, Registry[Schedule]] = {
    collective: Registry(
        f"{collective} algorithm",
        f"unisono.collectives.algorithms.{collective}",
        group=f"unisono.algorithms.{collective}",
    )
    for collective in COLLECTIVES
}
"""For each collective, its algorithms: `SCHEDULES["all_reduce"]["ring"]`."""
