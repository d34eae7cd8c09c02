"""Virtual time: simulates whole programs with seeded thread scheduling, on a clock that never really waits."""

from __future__ import annotations

from unisono.simulation.patching import interposed
from unisono.simulation.scheduler import EndedError, TaskScheduler, here, name_ranks, unpatched, waiting

__all__ = ["EndedError", "TaskScheduler", "here", "interposed", "name_ranks", "unpatched", "waiting"]
