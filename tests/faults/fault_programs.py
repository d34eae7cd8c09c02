"""Faults between ranks, in the order of the table, and the outcome of every rank.

A program gets a communicator of its own, of three ranks. Rank 1 is the one that does something else, unless it says so.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from fault_rows import FAULTS, odd

from unisono.errors import CommError

for rows in ("fault_wrong_calls", "fault_waits", "fault_deaths", "fault_processes"):
    import_module(rows)


@dataclass
class Seen:
    """Outcome of a rank: times are of the monotonic clock, which all processes of a host share."""

    rank: int
    kind: str = "nothing was raised"
    classes: tuple[str, ...] = ()
    text: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    came_s: float = 0.0
    told_s: float = 0.0
    later: str = ""
    later_text: str = ""
    later_took_s: float = 0.0


def observe(comm: Any, name: str, own: bool) -> Seen:
    """Be a rank of a fault: run it on a communicator of its own, and tell what happened."""
    found = FAULTS[name]
    # Which ones are broken by it is the fault's business; the one that it was made of stays.
    part = comm if own else comm.dup()
    comm.barrier()
    seen = Seen(comm.rank, came_s=time.monotonic())
    try:
        found.run(part)
    except (Exception, SystemExit) as error:
        seen.told_s = time.monotonic()
        seen.came_s = getattr(part, "came_s", seen.came_s)
        seen.kind, seen.text = type(error).__name__, str(error)
        seen.classes = tuple(kind.__name__ for kind in type(error).__mro__)
        seen.fields = {key: getattr(error, key, None) for key in ("rank", "size", "operation", "call", "group", "peer")}
    started = time.monotonic()
    try:
        part.barrier(timeout=5.0)
    except CommError as error:
        seen.later, seen.later_text = type(error).__name__, str(error)
    seen.later_took_s = time.monotonic() - started
    if hasattr(part, "stopped") and not odd(comm):
        # Once one rank has the error, all have: the group has failed.
        os.kill(part.stopped, signal.SIGCONT)
    return seen
