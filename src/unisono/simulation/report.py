"""Report of a deadlock, in text: for each rank its call, the line, and what it waits for."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Collection, Mapping, Sequence
from heapq import nsmallest
from types import FrameType

from unisono.errors import CommTimeoutError
from unisono.simulation.tasks import Task

__all__ = ["deadlock_report", "name_ranks", "stuck_error"]

_NAMED = 8
_MOST_LINES = 16
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARY = os.path.dirname(os.path.dirname(_HERE)) + os.sep
_STANDARD = os.path.dirname(os.path.abspath(threading.__file__)) + os.sep
_TORCH = f"{os.sep}torch{os.sep}"


def deadlock_report(ranks: Mapping[int, Sequence[Task]], now_s: float) -> tuple[str, dict[int, str]]:
    """Return a sentence that names each rank, and the operation of each rank, where known.

    Ranks that wait alike are named together, and the sentence is short however many ranks there are.

    Args:
        ranks: For each rank, its tasks that have not ended.
        now_s: Virtual time, in seconds.
    """
    frames = sys._current_frames()
    operations: dict[int, str] = {}
    alike: dict[str, list[int]] = {}
    for rank, tasks in sorted(ranks.items()):
        # The others, if any, wait for collectives that the program has started.
        for main in [task for task in tasks if task.main]:
            operation, site = _operation_of(frames.get(main.ident or 0))
            if operation is not None:
                operations[rank] = operation
            waits = [wait() for task in (main, *(t for t in tasks if t is not main)) for wait in task.waits[-1:]]
            where = (f" in {operation}" if operation else "") + (f" at {site}" if site else "")
            text = f"{where} {'; '.join(waits) if waits else 'for something in its own process'}"
            alike.setdefault(text, []).append(rank)
    lines = [f"{name_ranks(some)} wait{'s' * (len(some) == 1)}{text}" for text, some in alike.items()]
    hidden = sum(map(len, list(alike.values())[_MOST_LINES:]))
    lines[_MOST_LINES:] = [f"{hidden} ranks more wait"] if hidden else []
    return f"no rank can continue, at {now_s:.6f} s: {', and '.join(lines)}", operations


def name_ranks(ranks: Collection[int]) -> str:
    """Return a text that names some ranks, the first few of them if there are many.

    Example:
        >>> name_ranks({3}), name_ranks({2, 1}), name_ranks(range(500))
        ('rank 3', 'ranks 1, 2', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 492 more')
    """
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, nsmallest(_NAMED, ranks)))}{more}"


def stuck_error(task: Task | None, stuck_s: float) -> CommTimeoutError:
    """Return the error of a simulation whose running task neither ends nor blocks, with the stack of the task."""
    frame = sys._current_frames().get(task.ident or 0) if task is not None else None
    stack = "".join(traceback.format_stack(frame)) if frame is not None else "nowhere\n"
    name = task.name if task is not None else "a task"
    return CommTimeoutError(
        f"{name} has blocked all other tasks for {stuck_s:.0f} s of real time: it computes without end, or "
        f"waits for something outside the simulation. Its stack:\n{stack}",
        waited_s=stuck_s,
    )


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
