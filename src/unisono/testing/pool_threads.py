"""Thread ranks of one program, within a limit of time."""

from __future__ import annotations

import ctypes
import threading
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


def run_limited(
    fn: Callable[..., Any], size: int, backend: str, args: tuple[Any, ...], limit_s: float, options: dict[str, Any]
) -> list[Any]:
    """Return what `run_ranks` returns; leave the ranks behind at the limit, or if the caller is interrupted.

    Raises:
        CommTimeoutError: The program took longer than `limit_s`; the message says where its ranks are.
    """
    running: dict[int, int] = {}
    over = threading.Event()

    def program(comm: Communicator, *args: Any) -> Any:
        running[comm.rank] = threading.get_ident()
        try:
            # Ranks that start later than the caller leaves are not among those that it ends.
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
        # Inside: ranks may run, and the caller be interrupted, before this returns.
        threading.Thread(target=start, name="unisono launch", daemon=True).start()
        results, error = ended.get(timeout=limit_s)
    except Empty:
        raise overdue(limit_s, _stacks(running)) from None
    except BaseException as interruption:
        interruption.add_note(where(_stacks(running)))
        raise
    finally:
        over.set()
        for thread in list(running.values()):
            # Ends a loop in Python. A thread that is blocked in C ends with this process.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))
    if error is not None:
        raise error
    return results


def overdue(limit_s: float, stacks: Mapping[int, str]) -> CommTimeoutError:
    """Return the error of a program that took too long.

    Args:
        limit_s: Seconds that it was given.
        stacks: The stack of each rank that has not ended.
    """
    ranks = ", ".join(map(str, sorted(stacks)))
    return CommTimeoutError(
        f"the program did not end within {limit_s:g} s on rank{'s'[: len(stacks) > 1]} {ranks}. {where(stacks)}"
    )


def where(stacks: Mapping[int, str]) -> str:
    """Return the places of ranks as text."""
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
