"""Virtual time: simulation of whole programs with seeded thread scheduling, on a clock that never really waits."""

from __future__ import annotations

from unisono.simulation.patching import interposed
from unisono.simulation.report import name_ranks
from unisono.simulation.scheduler import EndedError, Scheduler
from unisono.simulation.tasks import Task, TaskScheduler, here, unpatched, waiting

__all__ = [
    "EndedError",
    "Scheduler",
    "Task",
    "TaskScheduler",
    "here",
    "interposed",
    "name_ranks",
    "unpatched",
    "waiting",
]
