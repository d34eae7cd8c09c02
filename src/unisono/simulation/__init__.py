"""Virtual time: whole programs whose threads take turns by a seed, on a clock that nobody has to wait for."""

from __future__ import annotations

from unisono.simulation.patching import interposed
from unisono.simulation.scheduler import EndedError, Scheduler
from unisono.simulation.tasks import Task, here, unpatched, waiting

__all__ = ["EndedError", "Scheduler", "Task", "here", "interposed", "unpatched", "waiting"]
