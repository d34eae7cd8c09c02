"""Report of a deadlock, in text: for each rank its call, the line, and what it waits for."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from types import FrameType

from unisono.simulation.tasks import Task

__all__ = ["deadlock_report"]

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARY = os.path.dirname(os.path.dirname(_HERE)) + os.sep
_STANDARD = os.path.dirname(os.path.abspath(threading.__file__)) + os.sep
_TORCH = f"{os.sep}torch{os.sep}"


def deadlock_report(tasks: Sequence[Task], now_s: float) -> tuple[str, dict[int, str]]:
    """Return a sentence that names each rank, and the operation of each rank, where known."""
    frames = sys._current_frames()
    lines, operations = [], {}
    for task in sorted((task for task in tasks if task.main and not task.done), key=lambda task: task.rank or 0):
        rank = task.rank or 0
        operation, site = _operation_of(frames.get(task.ident or 0))
        if operation is not None:
            operations[rank] = operation
        # Another thread of the rank waits for a collective that was started earlier.
        waits = [wait() for other in (task, *_helpers(tasks, task)) for wait in other.waits[-1:]]
        where = (f" in {operation}" if operation else "") + (f" at {site}" if site else "")
        lines.append(f"rank {rank} waits{where} {'; '.join(waits) if waits else 'for something in its own process'}")
    return f"no rank can continue, at {now_s:.6f} s: {', and '.join(lines)}", operations


def _helpers(tasks: Sequence[Task], main: Task) -> list[Task]:
    return [task for task in tasks if task.rank == main.rank and task is not main and not task.done]


def _operation_of(frame: FrameType | None) -> tuple[str | None, str | None]:
    """Return the library operation that the user's program is in, and the line that called it."""
    operation: str | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_LIBRARY):
            operation = operation if file.startswith(_HERE) else frame.f_code.co_name
        elif not (file.startswith(_STANDARD) and "site-packages" not in file) and _TORCH not in file:
            return operation, f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return None, None
