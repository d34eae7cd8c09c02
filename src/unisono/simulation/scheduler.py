"""Scheduler for tasks and virtual time: one thread runs at a time, chosen by a seeded generator."""

from __future__ import annotations

import _thread
import math
import os
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from heapq import heappop, heappush, nsmallest
from itertools import count
from random import Random
from types import FrameType
from typing import NamedTuple

from unisono.core.flight_recorder import is_internal, site_of, thread_frames, users_frame, with_callers
from unisono.errors import CommTimeoutError, DeadlockError

__all__ = ["EndedError", "SimulatedTask", "TaskScheduler", "here", "name_ranks", "nanoseconds", "unpatched", "waiting"]

_Wait = Callable[[], str]
"""Function that returns a description of a wait, called only when the description is needed."""


class SimulatedTask:
    """A simulated thread, which runs only while the scheduler has selected it.

    Attributes:
        scheduler: The task's scheduler.
        name: Name in the trace.
        rank: Rank to which the task belongs, or None.
        main: Whether the task runs a rank's program. The simulation ends when all main tasks have ended.
        ident: Thread identifier; None until the task has run.
        gate: Real lock that the scheduler releases to let the task run.
        blocked: Whether the task is waiting, for a wake-up or a deadline.
        woken: Whether the task's last wait ended with a wake-up, not at its deadline.
        number: Number of the current wait, so that an earlier wait's deadline cannot end the current wait.
        pending: Exception to raise in the current or next wait, or None.
        waits: Descriptions of the task's nested waits, innermost last.
        hasty: Number of the enclosing `waiting` contexts that are hasty.
        polls: Number of clock or flag reads since the task last yielded.
        children: Number of threads that the task has started.
        joiners: Tasks that wait for this task to end.
        done: Whether the task has ended.
        thread: The task's thread.
    """

    def __init__(self, scheduler: TaskScheduler, name: str, rank: int | None, main: bool) -> None:
        self.scheduler = scheduler
        self.name = name
        self.rank = rank
        self.main = main
        self.gate: _thread.LockType = _thread.allocate_lock()
        self.gate.acquire()
        self.thread: threading.Thread
        self.ident: int | None = None
        self.done = self.blocked = self.woken = False
        self.number = self.polls = self.hasty = self.children = 0
        self.pending: BaseException | None = None
        self.waits: list[_Wait] = []
        self.joiners: list[SimulatedTask] = []


class _Here(threading.local):
    task: SimulatedTask | None = None


_here = _Here()


def here() -> SimulatedTask | None:
    """Return this thread's task, or None outside simulations."""
    return _here.task


@contextmanager
def _as_task(task: SimulatedTask | None) -> Iterator[None]:
    """Return a context in which this thread counts as the given task."""
    before = _here.task
    _here.task = task
    try:
        yield
    finally:
        _here.task = before


def unpatched() -> AbstractContextManager[None]:
    """Return a context in which this thread is outside its simulation: clocks, locks and waits are real."""
    return _as_task(None)


@contextmanager
def waiting(describe: _Wait, *, hasty: bool = False) -> Iterator[None]:
    """Return a context that describes the waits inside it. Outside simulations, the context has no effect.

    Args:
        describe: Function that returns the description.
        hasty: Whether the waits always end at their deadline, even if that is far away; no deadlock is reported before
            then.
    """
    task = here()
    if task is None:
        yield
        return
    task.waits.append(describe)
    task.hasty += hasty
    try:
        yield
    finally:
        task.waits.pop()
        task.hasty -= hasty


_NS = 1_000_000_000
"""Nanoseconds per second."""

_Action = Callable[[], object]


def nanoseconds(seconds: float) -> int:
    """Convert a time of up to a century to nanoseconds. Rounds up so that a waiter never wakes with time remaining."""
    return math.ceil(min(max(seconds, 0.0), 3.2e9) * _NS)


class _Event(NamedTuple):
    """Action scheduled at a virtual time. Events are compared by their first three fields.

    Attributes:
        when: Virtual time, in nanoseconds.
        chance, number: Numbers that order simultaneous events: a random one, and one that differs between all events.
        fire: The action.
        live: Function that returns whether the action is still wanted.
    """

    when: int
    chance: float
    number: int
    fire: _Action
    live: Callable[[], bool]


class _Calendar:
    """Events ordered by time. A seeded generator orders simultaneous events."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._count = count()
        # Deadlines of waits with the default timeout are stored separately: if only these deadlines are left, the ranks
        # are deadlocked.
        self._patient: list[_Event] = []
        self._others: list[_Event] = []

    def add(self, when: int, fire: _Action, live: Callable[[], bool] = lambda: True, *, patient: bool = False) -> None:
        """Schedule an action.

        Args:
            when: Virtual time, in nanoseconds.
            fire: The action.
            live: Function that returns whether the action is still wanted.
            patient: Whether the action is merely the deadline of a wait with (nearly) the default timeout.
        """
        heap = self._patient if patient else self._others
        heappush(heap, _Event(when, self._random.random(), next(self._count), fire, live))

    def next(self) -> _Event | None:
        """Remove and return the first event; None if only deadlines of waits with the default timeout are left."""
        for heap in (self._patient, self._others):
            while heap and not heap[0].live():
                heappop(heap)
        if not self._others:
            return None
        heap = self._patient if self._patient and self._patient[0] < self._others[0] else self._others
        return heappop(heap)


_POLLS = 100
_POLL_NS = 1000
_PATIENT = 0.9
_LEAVE_S = 10.0
_AWAY_S = 1e-4


class EndedError(BaseException):
    """Raised in a thread that outlives its simulation, to terminate the thread."""


class TaskScheduler:
    """Runs tasks one at a time. When a task blocks or yields, a seeded generator chooses the task to run next.

    Virtual time stands still while any task can run; when none can, time jumps to the next event. A run therefore takes
    only the time of its computations, and depends only on the seed.

    If every task waits with at least 0.9 times the default timeout and no other event is scheduled, the program is in a
    deadlock: all ranks get `DeadlockError` immediately. Waits with a shorter timeout, and waits marked as `hasty`,
    end at their deadline.

    Args:
        seed: Seed for all choices.
        patience_s: Default timeout of an operation, in virtual seconds.
        stuck_s: Real seconds after which a task that has neither ended nor blocked is considered stuck.
        preempt: Probability that a task yields before it acquires a lock.

    Attributes:
        now: Virtual time, in nanoseconds.
        trace: Log with one line per event.
    """

    def __init__(
        self,
        seed: int,
        patience_s: float,
        stuck_s: float = 300.0,
        preempt: float = 0.0,
    ) -> None:
        self.now: int = 0
        self.trace: list[str] = []
        self._random = Random(seed)
        self._patience = int(_PATIENT * patience_s * _NS)
        self._stuck_s = stuck_s
        self._preempt = preempt
        self._tasks: list[SimulatedTask] = []
        # For each rank, the tasks that have not ended, in the order in which they were started.
        self._alive: defaultdict[int | None, dict[SimulatedTask, None]] = defaultdict(dict)
        self._ready: list[SimulatedTask] = []
        self._calendar = _Calendar(self._random)
        self._due: list[_Action] = []
        self._running: SimulatedTask | None = None
        self._turns = self._mains = self._left = 0
        self._over = False
        self._failure: BaseException | None = None
        self._driver = _thread.allocate_lock()
        self._driver.acquire()
        self._clock = self.start(self._tick, "clock", None)

    # -- for the driver of the simulation --------------------------------------------------------------
    def start(self, run: _Action, name: str, rank: int | None, *, main: bool = False) -> SimulatedTask:
        """Start a new task, ready to run, on a new thread."""
        task = SimulatedTask(self, name, rank, main)
        task.thread = threading.Thread(target=self.live, args=(task, run), name=name, daemon=True)
        self.admit(task)
        task.thread.start()
        return task

    def admit(self, task: SimulatedTask) -> None:
        """Add a task whose thread is about to call `live`."""
        self._tasks.append(task)
        self._alive[task.rank][task] = None
        self._ready.append(task)
        self._mains += task.main
        self._left += task.main

    def run(self) -> None:
        """Run until all ranks' programs have ended; on return or error, no simulated threads are left.

        Raises:
            CommTimeoutError: A task is stuck: it computes forever or waits in real time.
        """
        try:
            self._pass_to(self._choose())
            turns = -1
            while not self._driver.acquire(timeout=self._stuck_s):
                if turns == self._turns:
                    raise _stuck_error(self._running, self._stuck_s)
                turns = self._turns
        finally:
            self._end()
        if self._failure is not None:
            raise self._failure

    # -- for tasks ---------------------------------------------------------------------------------
    def block(self, deadline: int | None = None, *, hasty: bool = False) -> bool:
        """Wait for a wake-up or until `deadline` (in nanoseconds). Return whether the task was woken.

        Args:
            deadline: Virtual time at which the wait ends; None for no limit.
            hasty: As for `waiting`.
        """
        task = self._me()
        task.number += 1
        task.polls = 0
        task.blocked = True
        task.woken = False
        if deadline is not None:
            number = task.number

            def expire() -> None:
                self.wake(task)
                task.woken = False

            patient = deadline - self.now >= self._patience and not (hasty or task.hasty)
            self._calendar.add(deadline, expire, lambda: task.blocked and task.number == number, patient=patient)
        self._switch_to(task)
        return task.woken

    def wake(self, task: SimulatedTask) -> None:
        """Wake a task if it is waiting."""
        if task.blocked:
            task.blocked = False
            task.woken = True
            self._ready.append(task)

    def throw(self, task: SimulatedTask, error: BaseException) -> None:
        """Raise an error in another task, in its current or next wait."""
        task.pending = error
        self.wake(task)

    def pause(self) -> None:
        """Yield: choose at random among this task and all other tasks that can run."""
        if not self._over:
            task = self._me()
            task.polls = 0
            self._ready.append(task)
            self._switch_to(task)

    def before_lock(self) -> None:
        """Yield at random before acquiring a lock, so that other tasks may change state that was read before."""
        if self._preempt and not self._over and self._random.random() < self._preempt:
            # Sleep to imitate preemption by an operating system: messages may arrive during the sleep.
            self.sleep(self._random.choice((0.0, _AWAY_S * self._random.random())))

    def sleep(self, seconds: float) -> None:
        """Wait for this much virtual time."""
        self.block(self.now + nanoseconds(seconds), hasty=True)

    def poll(self) -> None:
        """Charge virtual time for reading a clock or flag, so that polling loops make progress."""
        task = here()
        if task is not None and not self._over:
            task.polls += 1
            if task.polls >= _POLLS:
                self.sleep(_POLL_NS / _NS)

    def at(self, when: int, action: _Action) -> None:
        """Run an action at virtual time `when`, on a separate thread so that the action may wait for locks."""

        def fire() -> None:
            self._due.append(action)
            self.wake(self._clock)

        self._calendar.add(when, fire)

    def note(self, text: str) -> None:
        """Append a line to the trace."""
        task = here()
        name = "nobody" if task is None else task.name
        self.trace.append(f"{self.now / _NS:.9f} {name}: {text}")

    def choose(self, among: int) -> int:
        """Return a seeded random index for choosing among this many items."""
        return self._random.randrange(among) if among > 1 else 0

    def chance(self) -> float:
        """Return a seeded random number from 0 to 1."""
        return self._random.random()

    def of_rank(self, rank: int) -> list[SimulatedTask]:
        """Return a rank's tasks that have not ended."""
        return list(self._alive.get(rank, ()))

    def live(self, task: SimulatedTask, run: _Action) -> None:
        """Run a task from start to end, in the task's own thread."""
        task.gate.acquire()
        task.ident = _thread.get_ident()
        try:
            with _as_task(task):
                self._raise_pending(task)
                run()
        except EndedError:
            pass
        finally:
            task.done = True
            del self._alive[task.rank][task]
            self._left -= task.main
            for joiner in task.joiners:
                self.wake(joiner)
            self._pass_to(self._choose())

    # -- the baton ---------------------------------------------------------------------------------
    def _me(self) -> SimulatedTask:
        task = here()
        assert task is not None, "only a task of the simulation can wait in it"
        if self._over:
            raise EndedError
        return task

    def _switch_to(self, task: SimulatedTask) -> None:
        following = self._choose()
        if following is not task:
            self._pass_to(following)
            task.gate.acquire()
        self._raise_pending(task)

    def _raise_pending(self, task: SimulatedTask) -> None:
        if task.pending is not None:
            error = task.pending
            task.pending = None
            raise error

    def _pass_to(self, task: SimulatedTask | None) -> None:
        self._running = task
        (self._driver if task is None else task.gate).release()

    def _choose(self) -> SimulatedTask | None:
        """Return the task to run next; None if the simulation is over."""
        self._turns += 1
        while not self._over and self._left:
            if self._ready:
                return self._ready.pop(self.choose(len(self._ready)))
            # Advance time until a task can run.
            found = self._calendar.next()
            if found is None:
                self._break_deadlock()
            else:
                self.now = max(self.now, found.when)
                found.fire()
        return None

    def _break_deadlock(self) -> None:
        ranks = {rank: list(tasks) for rank, tasks in self._alive.items() if rank is not None}
        report, operations = _deadlock_report(ranks, self.now / _NS)
        self.trace.append(f"{self.now / _NS:.9f} deadlock: {report}")
        for rank, tasks in ranks.items():
            for task in filter(lambda task: task.main, tasks):
                error = DeadlockError(report, rank=rank, size=self._mains, operation=operations.get(rank))
                self.throw(task, error)

    def _tick(self) -> None:
        """Run all due actions; this is the body of the clock task."""
        while True:
            while self._due:
                action = self._due.pop(0)
                try:
                    action()
                except Exception as error:
                    self._failure = self._failure or error
                    self._over = True
                    return
            self.block()

    # -- the end -----------------------------------------------------------------------------------
    def _end(self) -> None:
        """Terminate every remaining thread at its current wait."""
        self._over = True
        if self._running is not None and not self._driver.acquire(timeout=_LEAVE_S):
            return
        for task in self._tasks:
            if not task.done:
                task.pending = EndedError()
                task.gate.release()
                self._driver.acquire()
        for task in self._tasks:
            task.thread.join(_LEAVE_S)


_NAMED = 8
_MOST_LINES = 16
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def _deadlock_report(ranks: Mapping[int, Sequence[SimulatedTask]], now_s: float) -> tuple[str, dict[int, str]]:
    """Return a sentence that names each rank and its operation (if known), and a dict of these operations by rank.

    Ranks in the same wait are named together, which keeps the sentence short even with many ranks.

    Args:
        ranks: Unfinished tasks of each rank.
        now_s: Virtual time, in seconds.
    """
    frames = thread_frames()
    operations: dict[int, str] = {}
    alike: dict[str, list[int]] = {}
    for rank, tasks in sorted(ranks.items()):
        # Report only the operations of the ranks' main tasks: the other tasks wait for collectives that the main tasks
        # have started.
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
    """Return text that names ranks, or only the first few if there are many.

    Example:
        >>> name_ranks({3}), name_ranks({2, 1}), name_ranks(range(500))
        ('rank 3', 'ranks 1, 2', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 492 more')
    """
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, nsmallest(_NAMED, ranks)))}{more}"


def _stuck_error(task: SimulatedTask | None, stuck_s: float) -> CommTimeoutError:
    """Return the error for a running task that neither ends nor blocks, with its stack."""
    frame = thread_frames().get(task.ident or 0) if task is not None else None
    stack = "".join(traceback.format_stack(frame)) if frame is not None else "nowhere\n"
    name = task.name if task is not None else "a task"
    return CommTimeoutError(
        f"{name} has blocked all other tasks for {stuck_s:.0f} s of real time: it computes without end, or "
        f"waits for something outside the simulation. Its stack:\n{stack}",
        waited_s=stuck_s,
    )


def _operation_of(frame: FrameType | None) -> tuple[str | None, str | None]:
    """Return the library operation that the user's program is running, and the line that called the operation."""
    # If no code is the user's, because the program belongs to an installed package, this is the package's frame.
    program = users_frame(frame)
    operation: str | None = None
    for each in with_callers(frame):
        if each is program:
            return operation, site_of(program)
        file = each.f_code.co_filename
        if is_internal(file) and not file.startswith(_HERE):
            operation = each.f_code.co_name
    return None, None
