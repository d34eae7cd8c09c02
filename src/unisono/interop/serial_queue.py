"""Runs one group's collectives one at a time, in the order of the calls, even if several threads call them."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable

from unisono.control.process_exit import CLOSE_HANDLES, when_process_ends
from unisono.core.threads import DaemonThreadPool, SerialWorker
from unisono.core.types import Timeout, Work
from unisono.core.work import Completion, raised_by
from unisono.errors import CommTimeoutError

__all__ = ["Job", "Progress", "SerialQueue"]

Job = Callable[[], object]

_AT_EXIT_S = 5.0
# The dictionary is global, because the jobs of all queues are completed at process exit, and has weak references, so
# that a queue is freed with its group.
_queues: weakref.WeakValueDictionary[int, SerialQueue] = weakref.WeakValueDictionary()


class _QueuedJob(Completion):
    """Queued job.

    A thread that waits for a job runs all jobs up to and including that job, unless another thread is running jobs.
    """

    def __init__(self, queue: SerialQueue, job: Job) -> None:
        # The wait itself has no timeout, because every job has its own timeout.
        super().__init__(threading.TIMEOUT_MAX)
        self._queue = queue
        self._job = job

    def perform(self) -> None:
        self.complete(raised_by(self._job))

    def wait(self, timeout: Timeout | None = None) -> None:
        # A waiter with its own timeout must not run jobs, because they may take longer than the timeout.
        if timeout is None and not self.is_completed():
            self._queue.hurry(self)
        super().wait(timeout)


class SerialQueue:
    """Queue of jobs. Threads that wait for a job run it; a thread created on demand runs jobs that nobody waits for.

    Callbacks of a completed job run on the thread that ran the job. A collective called by a callback runs immediately,
    before all queued jobs, so it has the same position in the order on every rank.
    """

    def __init__(self, name: str) -> None:
        self._threads = DaemonThreadPool(name)
        self._waiting: deque[_QueuedJob] = deque()
        # The thread that is running jobs holds this lock.
        self._turn = threading.Lock()
        self._driver: int | None = None
        self._starting = threading.Lock()
        self._worker_started = False
        _queues[id(self)] = self
        when_process_ends(_finish_all, CLOSE_HANDLES + 10)

    def run(self, job: Job) -> None:
        """Run a job after all queued jobs, and raise its error."""
        if self._driver == threading.get_ident():
            job()
        elif not self._waiting and self._turn.acquire(blocking=False):
            self._driver = threading.get_ident()
            try:
                while self._waiting:
                    self._waiting.popleft().perform()
                job()
            finally:
                self._leave()
        else:
            self.start(job).wait()

    def start(self, job: Job) -> Completion:
        """Queue a job and return immediately."""
        task = _QueuedJob(self, job)
        if self._driver == threading.get_ident():
            task.perform()
            return task
        self._waiting.append(task)
        # A worker is not needed if a thread holds `_turn`: that thread checks for waiting jobs after releasing the
        # lock.
        if not self._turn.locked():
            self._start_worker()
        return task

    def finish(self, patience_s: float) -> bool:
        """Wait until all currently queued jobs are done; return False on timeout."""
        if not self._waiting and not self._turn.locked():
            return True
        try:
            self.start(lambda: None).wait(patience_s)
        except CommTimeoutError:
            return False
        return True

    def hurry(self, task: Completion) -> None:
        """Run the queued jobs up to and including `task`, unless another thread is running jobs."""
        if self._turn.acquire(blocking=False):
            self._drive(lambda: not task.is_completed())

    def _leave(self) -> None:
        self._driver = None
        self._turn.release()
        if self._waiting:
            self._start_worker()

    def _start_worker(self) -> None:
        with self._starting:
            start = not self._worker_started
            self._worker_started = True
        if start:
            self._threads.run(self._work)

    def _work(self) -> None:
        # This wait needs no timeout, because the thread that holds the lock runs only jobs that have timeouts.
        self._turn.acquire()
        with self._starting:
            self._worker_started = False
        self._drive(lambda: True)

    def _drive(self, condition: Callable[[], bool]) -> None:
        self._driver = threading.get_ident()
        try:
            while self._waiting and condition():
                self._waiting.popleft().perform()
        finally:
            self._leave()


def _finish_all() -> None:
    """While the control plane is still running, complete the jobs that the program started but did not wait for.

    No job may run once Python is finalizing: Python then kills daemon threads that return from C++ code, which aborts
    the process.
    """
    if sys.exception() is None and getattr(sys, "last_value", None) is None:
        # Use `valuerefs`, which copies in one step: iterating over the dictionary would raise if a daemon thread
        # created a queue meanwhile.
        for ref in _queues.valuerefs():
            if (queue := ref()) is not None:
                queue.finish(_AT_EXIT_S)


_GRACE_S = 0.005


class Progress:
    """Completes messages in the background: torch users rely on this, but not every transport provides it.

    The background thread first gives waiting threads up to 5 ms to complete messages. It then requests the future of
    each message that is still incomplete, because requesting it starts a thread that completes the message.
    """

    def __init__(self, name: str) -> None:
        self._worker = SerialWorker(name)
        self._posted: deque[Work] = deque()
        # Whether the worker has yet to take the posted messages.
        self._is_due = False
        self._over = threading.Event()

    def watch(self, work: Work) -> None:
        """Ensure that an operation completes even if nobody waits for it."""
        if work.is_completed():
            return
        self._posted.append(work)
        if not self._is_due:
            self._is_due = True
            self._worker.run(self._look_after)

    def close(self) -> None:
        """Stop the background thread; after that, messages progress only while a thread waits for them."""
        self._over.set()
        self._worker.end()

    def _look_after(self) -> None:
        if self._over.wait(_GRACE_S):
            return
        # Reset this first: a message that is posted from now on needs another task, unless the loop still finds it.
        self._is_due = False
        while self._posted:
            work = self._posted.popleft()
            if not work.is_completed():
                work.get_future()
