"""Replaces Python's clocks, locks, queues and threads for the threads of a simulation.

Programs need not know that they are simulated: `time.sleep`, `threading.Thread`, `queue.Queue`, asyncio event loops,
and code built on these work in virtual time. Every replacement first checks whether a simulated task calls it; all
other threads of the process get the original behaviour. All patches are removed when the last simulation ends.
"""

from __future__ import annotations

import _thread
import queue
import selectors
import threading
import time
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from unisono.core import clock, compiled_code
from unisono.core.shared_context import Replacement, SharedContext, replaced
from unisono.core.threads import DaemonThreadPool
from unisono.simulation.scheduler import SimulatedTask, here, nanoseconds, unpatched

__all__ = ["EPOCH_S", "VirtualLock", "interposed"]

EPOCH_S = 1_767_225_600
"""Value of `time.time` at the start of a simulation: the beginning of 2026."""


@contextmanager
def _interpose() -> Iterator[None]:
    with (
        replaced([*_clocks(), *_locks(), *_threads(), *_pools(), *_torch(), *_loops()]),
        clock.virtual(_reader(clock.real, 0)),
    ):
        yield


interposed: SharedContext = SharedContext(_interpose)
"""Context in which tasks see virtual clocks, locks and threads."""


# -- clocks ----------------------------------------------------------------------------------------
def _clocks() -> list[Replacement]:
    real_sleep = time.sleep

    def sleep(seconds: float, /) -> None:
        task = here()
        if task is None:
            return real_sleep(seconds)
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        task.scheduler.sleep(seconds)

    found: list[Replacement] = [(time, "sleep", sleep)]
    for name in ("monotonic", "perf_counter", "time"):
        base_ns = EPOCH_S * 10**9 if name == "time" else 0
        seconds = _reader(getattr(time, name), base_ns)
        nanoseconds = _reader(getattr(time, f"{name}_ns"), base_ns, integer=True)
        found += [(time, name, seconds), (time, f"{name}_ns", nanoseconds)]
        if name == "monotonic":
            # `threading` and `queue` import the clock under other names, so patch those names too.
            found += [(owner, alias, seconds) for owner, alias in ((threading, "_time"), (queue, "time"))]
    return [patch for patch in found if hasattr(patch[0], patch[1])]


def _reader(real: Callable[[], float], base_ns: int, *, integer: bool = False) -> Callable[[], float]:
    def read() -> float:
        task = here()
        if task is None:
            return real()
        task.scheduler.poll()
        now = base_ns + task.scheduler.now
        return now if integer else now / 1e9

    return read


# -- locks and queues ------------------------------------------------------------------------------
def _locks() -> list[Replacement]:
    real_lock = threading.Lock
    real_rlock = threading.RLock
    real_is_set = threading.Event.is_set
    python_rlock: Any = threading._PyRLock  # type: ignore[attr-defined]  # annotations don't say what it is
    real_queue = queue.SimpleQueue
    # The queue module's type annotations don't declare `_PySimpleQueue`.
    python_queue = queue._PySimpleQueue  # type: ignore[attr-defined]

    def lock() -> Any:
        return real_lock() if here() is None else VirtualLock()

    def rlock() -> Any:
        return real_rlock() if here() is None else python_rlock()

    def is_set(event: threading.Event) -> bool:
        task = here()
        if task is not None and not real_is_set(event):
            task.scheduler.poll()
        return real_is_set(event)

    class SimpleQueue:
        def __new__(cls) -> Any:
            return real_queue() if here() is None else python_queue()

        def __class_getitem__(cls, item: object) -> type:
            return cls

    # Condition, Event, Semaphore, Barrier and queue.Queue need no further patches, because they are built on these
    # locks.
    return [
        (threading, "Lock", lock),
        (threading, "_allocate_lock", lock),
        (threading, "RLock", rlock),
        (threading.Event, "is_set", is_set),
        (queue, "SimpleQueue", SimpleQueue),
    ]


# -- threads ---------------------------------------------------------------------------------------
def _threads() -> list[Replacement]:
    real_start = threading.Thread.start
    real_join = threading.Thread.join
    real_is_alive = threading.Thread.is_alive

    def start(thread: threading.Thread) -> None:
        parent = here()
        if parent is None:
            return real_start(thread)
        # Name the task after its parent: default thread names count all threads of the process, so they are not
        # reproducible.
        parent.children += 1
        task = SimulatedTask(parent.scheduler, f"{parent.name}.{parent.children}", parent.rank, False)
        task.thread = thread
        run = thread.run
        thread.__dict__.update(_unisono_task=task, run=lambda: parent.scheduler.live(task, run))
        with unpatched():
            # `_started` was created in a task, so it waits in virtual time. Replace `_started` with a real event,
            # because a new thread notifies its parent in real time.
            thread.__dict__["_started"] = threading.Event()
            real_start(thread)
        parent.scheduler.admit(task)

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        me = here()
        task = _task_of(thread)
        if me is None or task is None:
            return real_join(thread, timeout)
        deadline = None if timeout is None else me.scheduler.now + nanoseconds(timeout)
        while not task.done:
            task.joiners.append(me)
            if not me.scheduler.block(deadline):
                return None
        with unpatched():
            real_join(thread)

    def is_alive(thread: threading.Thread) -> bool:
        task = _task_of(thread)
        if here() is None or task is None:
            return real_is_alive(thread)
        return not task.done

    return [
        (threading.Thread, "start", start),
        (threading.Thread, "join", join),
        (threading.Thread, "is_alive", is_alive),
    ]


def _pools() -> list[Replacement]:
    real_run = DaemonThreadPool.run

    def run(pool: DaemonThreadPool, task: Callable[[], object]) -> None:
        if here() is None:
            real_run(pool, task)
        else:
            # The pool's idle threads are not in this simulation, and wait for tasks in real time.
            threading.Thread(target=task, name=pool.name, daemon=True).start()

    return [(DaemonThreadPool, "run", run)]


def _task_of(thread: threading.Thread) -> SimulatedTask | None:
    return thread.__dict__.get("_unisono_task")


# -- torch -----------------------------------------------------------------------------------------
def _torch() -> list[Replacement]:
    """Patch what would block all other tasks: futures, which wait in C++, and Dynamo, which compiles under a lock."""
    kind: Any = torch.futures.Future
    real_wait = kind.wait

    def wait(future: Any) -> Any:
        if here() is not None and not future.done():
            done = threading.Event()
            future.add_done_callback(lambda _: done.set())
            done.wait()
        return real_wait(future)

    # A task that reads the simulated clock may yield. If it yielded while it held that lock, the next task to compile
    # would wait for the lock in real time, and block the simulation.
    return [(kind, "wait", wait), (compiled_code, "compiling", unpatched)]


# -- asyncio ---------------------------------------------------------------------------------------
def _loops() -> list[Replacement]:
    """Patch asyncio loops: they wait in a selector for the next timer or for another thread's write."""
    kind = selectors.DefaultSelector
    loops = BaseSelectorEventLoop
    real_select = kind.select
    # The event loop's type annotations don't declare `_write_to_self`.
    real_write = loops._write_to_self  # type: ignore[attr-defined]
    waiting: dict[Any, SimulatedTask] = {}

    def select(selector: Any, timeout: float | None = None) -> Any:
        task = here()
        if task is None:
            return real_select(selector, timeout)
        found = real_select(selector, 0)
        if found or (timeout is not None and timeout <= 0):
            task.scheduler.poll()
            return found
        # Only a timer or `_write_to_self` can end this wait: other sources, such as sockets, are outside the
        # simulation.
        waiting[selector] = task
        try:
            task.scheduler.block(None if timeout is None else task.scheduler.now + nanoseconds(timeout), hasty=True)
        finally:
            del waiting[selector]
        return real_select(selector, 0)

    def write(loop: Any) -> None:
        real_write(loop)
        me = here()
        task = waiting.get(loop._selector)
        if me is not None and task is not None:
            me.scheduler.wake(task)

    return [(kind, "select", select), (loops, "_write_to_self", write)]


class VirtualLock:
    """Replacement for `threading.Lock`.

    A lock may outlive its simulation, so threads outside simulations can also use it, and then wait in real time.
    """

    __slots__ = ("_lock", "_tasks")

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._tasks: list[SimulatedTask] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        task = here()
        if task is None:
            return self._lock.acquire(blocking, timeout)
        task.scheduler.before_lock()
        if self._lock.acquire(False):
            return True
        if not blocking:
            task.scheduler.poll()
            return False
        deadline = None if timeout < 0 else task.scheduler.now + nanoseconds(timeout)
        while True:
            self._tasks.append(task)
            try:
                woken = task.scheduler.block(deadline)
            finally:
                if task in self._tasks:
                    self._tasks.remove(task)
            if self._lock.acquire(False):
                return True
            if not woken:
                return False

    def release(self) -> None:
        self._lock.release()
        if self._tasks:
            # Choose a waiter at random: a lock does not guarantee an order among its waiters.
            scheduler = self._tasks[0].scheduler
            scheduler.wake(self._tasks.pop(scheduler.choose(len(self._tasks))))

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self._lock = _thread.allocate_lock()
        self._tasks.clear()
