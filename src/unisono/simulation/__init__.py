"""Simulates whole programs with seeded thread scheduling, in virtual time: waits take no real time."""

from unisono.simulation.patching import interposed
from unisono.simulation.scheduler import EndedError, TaskScheduler, here, name_ranks, unpatched, waiting

__all__ = ["EndedError", "TaskScheduler", "here", "interposed", "name_ranks", "unpatched", "waiting"]
