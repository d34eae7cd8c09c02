"""Collective algorithms by name, each a file of pure integers: `schedules/<collective>/<algorithm>.py`."""

from __future__ import annotations

from unisono.registry import Registry
from unisono.schedules.meaning import COLLECTIVES, chunks_of
from unisono.schedules.step import Cost, Move, Schedule, Step

__all__ = ["COLLECTIVES", "SCHEDULES", "Cost", "Move", "Schedule", "Step", "chunks_of"]

SCHEDULES: dict[str, Registry[Schedule]] = {
    collective: Registry(f"{collective} algorithm", f"unisono.schedules.{collective}") for collective in COLLECTIVES
}
"""For each collective, its algorithms: `SCHEDULES["all_reduce"]["ring"]`."""
