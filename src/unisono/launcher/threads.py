"""Ranks as threads of this process."""

from __future__ import annotations

import queue
import threading
import time

from unisono.control.local import LocalHub
from unisono.core.failure import Cause
from unisono.core.group import Group
from unisono.launcher.job import GRACE_S, Job, Outcome

__all__ = ["run_threads"]


def run_threads(job: Job, size: int, on_failure: str) -> list[Outcome]:
    """Run a job on `size` threads; outcomes in the order in which ranks ended.

    A thread cannot be ended from outside: one that does not end within the grace after a failure
    is left behind as a daemon, and counts as ended.
    """
    hub, done = LocalHub(), queue.SimpleQueue[Outcome]()

    def main(rank: int) -> None:
        control = hub.control()
        try:
            done.put(Outcome(rank, job.run(Group.world(rank, size), control)))
        except BaseException as error:
            done.put(Outcome(rank, error=error))
        finally:
            control.close()

    try:
        for rank in range(size):
            threading.Thread(target=main, args=(rank,), name=f"unisono rank {rank}", daemon=True).start()
        return _collect(done, size, on_failure)
    except BaseException as error:
        # The caller was interrupted. No thread waits for the ranks any more; they end at their next call.
        cause = Cause("AbortedError", None, f"launch was ended by {type(error).__name__}")
        hub.control().report_failure(Group.world(0, size), cause)
        raise


def _collect(done: queue.SimpleQueue[Outcome], size: int, on_failure: str) -> list[Outcome]:
    """Outcomes, until all ranks have ended, or the grace after a failure is over."""
    ended: list[Outcome] = []
    deadline: float | None = None
    while len(ended) < size:
        try:
            ended.append(done.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic())))
        except queue.Empty:
            break
        if ended[-1].error is not None and on_failure == "end" and deadline is None:
            deadline = time.monotonic() + GRACE_S
    return ended
