"""Runs a program on thread ranks, within a time limit."""

from __future__ import annotations

import ctypes
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from unisono.communicator import Communicator
from unisono.core.flight_recorder import thread_frames
from unisono.errors import CommTimeoutError
from unisono.testing.namespaced_ranks import run_ranks

__all__ = ["LIBRARY", "overdue", "run_limited", "where"]

LIBRARY = str(Path(__file__).parents[1])
_IMPORTING_S = 0.05
"""Seconds between checks of an abandoned rank that is importing a module."""


def run_limited(
    fn: Callable[..., Any], size: int, backend: str, args: tuple[Any, ...], limit_s: float, options: dict[str, Any]
) -> list[Any]:
    """Return the result of `run_ranks`; abandon the ranks at the time limit, or if the caller is interrupted.

    Raises:
        CommTimeoutError: The program took longer than `limit_s`; the message has the stack of each rank.
    """
    running: dict[int, int] = {}
    over = threading.Event()

    def program(comm: Communicator, *args: Any) -> Any:
        running[comm.rank] = threading.get_ident()
        try:
            # The caller has returned and cannot stop this rank, so the rank stops itself.
            if over.is_set():
                raise SystemExit
            return fn(comm, *args)
        finally:
            del running[comm.rank]

    ended: SimpleQueue[tuple[list[Any], BaseException | None]] = SimpleQueue()

    def start() -> None:
        try:
            ended.put((run_ranks(program, size, backend, *args, **options), None))
        except BaseException as error:
            ended.put(([], error))

    try:
        # Start the thread inside the `try` block: before `Thread.start` returns, ranks may already be running, and the
        # caller may be interrupted.
        threading.Thread(target=start, name="unisono launch", daemon=True).start()
        results, error = ended.get(timeout=limit_s)
    except Empty:
        raise overdue(limit_s, _stacks(running)) from None
    except BaseException as interruption:
        interruption.add_note(where(_stacks(running)))
        raise
    finally:
        over.set()
        stopped = set[int]()
        if running and _end(running, stopped):
            threading.Thread(target=_end_importing, args=(running, stopped), name="unisono launch", daemon=True).start()
    if error is not None:
        raise error
    return results


def _end(running: dict[int, int], stopped: set[int]) -> bool:
    """Stop the abandoned ranks, except ranks that are importing a module; return whether such ranks remain.

    An exception in a thread that waits for another thread's import would leave the module's import lock held, and
    later programs in this process would wait for the lock forever.

    Args:
        running: Thread of each rank; a thread that exits removes itself.
        stopped: Threads stopped so far; updated by this function.
    """
    frames = thread_frames()
    for thread in set(running.copy().values()) - stopped:
        # Skip a thread that is importing, or waits for an import.
        stack = traceback.walk_stack(frames.get(thread))
        if not any(frame.f_code.co_filename.startswith("<frozen importlib") for frame, _ in stack):
            # The exception interrupts only Python code; a thread that is blocked in C code exits only with this
            # process.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))
            stopped.add(thread)
    return bool(set(running.copy().values()) - stopped)


def _end_importing(running: dict[int, int], stopped: set[int]) -> None:
    """Stop the remaining threads once they have finished importing."""
    while _end(running, stopped):
        time.sleep(_IMPORTING_S)


def overdue(limit_s: float, stacks: Mapping[int, str]) -> CommTimeoutError:
    """Return the error for a program that took too long.

    Args:
        limit_s: The program's time limit in seconds.
        stacks: The stack of each rank that has not ended.
    """
    ranks = ", ".join(map(str, sorted(stacks)))
    return CommTimeoutError(
        f"the program did not end within {limit_s:g} s on rank{'s'[: len(stacks) > 1]} {ranks}. {where(stacks)}"
    )


def where(stacks: Mapping[int, str]) -> str:
    """Return the stacks of ranks as text."""
    return "\n".join(f"Rank {rank} was at:\n{stack}" for rank, stack in sorted(stacks.items()))


def _stacks(running: Mapping[int, int]) -> dict[int, str]:
    """Return the stack of each rank, without frames of the library."""
    frames = thread_frames()
    stacks = {}
    for rank, thread in dict(running).items():
        lines = traceback.extract_stack(frames.get(thread))
        kept = [line for line in lines if not line.filename.startswith((LIBRARY, threading.__file__))]
        stacks[rank] = "".join(traceback.format_list(kept)).rstrip()
    return stacks
