"""Scheduler of tasks and virtual time: exactly one thread runs at a time, chosen by a seed."""

from __future__ import annotations

import _thread
import threading
from collections import defaultdict
from collections.abc import Callable
from random import Random

from unisono.errors import DeadlockError
from unisono.simulation.events import NS, Action, EventQueue, Timeout, Timer, nanoseconds
from unisono.simulation.report import deadlock_report, stuck_error
from unisono.simulation.tasks import Task, as_task, here

__all__ = ["EndedError", "Scheduler"]

_POLLS = 100
_POLL_NS = 1000
_PATIENT = 0.9
_LEAVE_S = 10.0
_AWAY_S = 1e-4


class EndedError(BaseException):
    """Raised in threads that outlive their simulation, so that none leaks."""


class Scheduler:
    """Runs tasks one at a time. When a task blocks or yields, the seed decides which one runs next.

    Time stands still while any task can run; then it jumps to the next event. So a run takes no longer
    than its computation, and depends only on the seed.

    It is a deadlock when only waits of (nearly) the default patience are left to end: then all ranks get
    `DeadlockError` immediately. Shorter waits, and those marked hasty, end at their time.

    Args:
        seed: Seed of all choices.
        patience_s: Default timeout of an operation, in virtual seconds.
        stuck_s: Real seconds after which a task that neither ends nor blocks is considered stuck.
        on_rank: Called with both ranks when a task of another rank than the last one runs.
        preempt: Probability that other tasks may run before a free lock is acquired.

    Attributes:
        now: Virtual time, in nanoseconds.
        trace: Event log, one line per event.
    """

    def __init__(
        self,
        seed: int,
        patience_s: float,
        stuck_s: float = 300.0,
        on_rank: Callable[[int | None, int], object] = lambda old, new: None,
        preempt: float = 0.0,
    ) -> None:
        self.seed = seed
        self.now = 0
        self.trace: list[str] = []
        self._random = Random(seed)
        self._patience = int(_PATIENT * patience_s * NS)
        self._stuck_s = stuck_s
        self._on_rank = on_rank
        self._preempt = preempt
        self._tasks: list[Task] = []
        # Those that have not ended, in order, by rank.
        self._alive: defaultdict[int | None, dict[Task, None]] = defaultdict(dict)
        self._ready: list[Task] = []
        self._calendar = EventQueue(self._random)
        self._due: list[Action] = []
        self._rank: int | None = None
        self._running: Task | None = None
        self._turns = self._mains = self._left = 0
        self._over = False
        self._failure: BaseException | None = None
        self._driver = _thread.allocate_lock()
        self._driver.acquire()
        self._clock = self.start(self._tick, "clock", None)

    # -- for the driver of the simulation --------------------------------------------------------------
    def start(self, run: Action, name: str, rank: int | None, *, main: bool = False) -> Task:
        """Start a new task on a thread of its own, which is ready to run."""
        task = Task(self, name, rank, main)
        thread = threading.Thread(target=self.live, args=(task, run), name=name, daemon=True)
        task.thread = thread
        self.admit(task)
        thread.start()
        return task

    def admit(self, task: Task) -> None:
        """Add a task with a thread that is about to call `live`."""
        self._tasks.append(task)
        self._alive[task.rank][task] = None
        self._ready.append(task)
        self._mains += task.main
        self._left += task.main

    def run(self) -> None:
        """Run until the last rank's program has ended. No thread is left when this returns or raises.

        Raises:
            CommTimeoutError: A task is stuck: it computes without end, or waits in real time.
        """
        try:
            self._pass_to(self._choose())
            turns = -1
            while not self._driver.acquire(timeout=self._stuck_s):
                if turns == self._turns:
                    raise stuck_error(self._running, self._stuck_s)
                turns = self._turns
            self._running = None
        finally:
            self._end()
        if self._failure is not None:
            raise self._failure

    # -- for tasks ---------------------------------------------------------------------------------
    def block(self, deadline: int | None = None) -> bool:
        """Wait for a wake-up, or until `deadline` (in nanoseconds); return whether it was a wake-up."""
        task = self._me()
        task.number += 1
        task.polls = 0
        task.blocked = True
        task.woken = False
        if deadline is not None:
            patient = deadline - self.now >= self._patience and not task.hasty
            self._calendar.add(deadline, Timeout(task, patient))
        self._switch_to(task)
        return task.woken

    def wake(self, task: Task) -> None:
        """Wake a task; no effect if it does not wait."""
        if task.blocked:
            task.blocked = False
            task.woken = True
            self._ready.append(task)

    def throw(self, task: Task, error: BaseException) -> None:
        """Raise an error in another task, at its current or next wait."""
        task.pending = error
        self.wake(task)

    def pause(self) -> None:
        """Yield to other tasks, if the seed decides so."""
        if not self._over:
            task = self._me()
            task.polls = 0
            self._ready.append(task)
            self._switch_to(task)

    def before_lock(self) -> None:
        """Yield, by chance, before a lock is acquired: state that was read before may change now."""
        if self._preempt and not self._over and self._random.random() < self._preempt:
            # Like a preemption by the operating system: messages may arrive meanwhile.
            self.sleep(self._random.choice((0.0, _AWAY_S * self._random.random())))

    def sleep(self, seconds: float) -> None:
        """Let this much virtual time pass."""
        task = self._me()
        task.hasty += 1
        try:
            self.block(self.now + nanoseconds(seconds))
        finally:
            task.hasty -= 1

    def poll(self) -> None:
        """Charge the cost of reading a clock or flag, so that loops that only poll make progress."""
        task = here()
        if task is not None and not self._over:
            task.polls += 1
            if task.polls >= _POLLS:
                self.sleep(_POLL_NS / NS)

    def at(self, when: int, action: Action) -> None:
        """Run an action when the clock reads `when`; on a separate thread, so it may wait for locks."""
        self._calendar.add(when, Timer(self._clock, self._due, action))

    def note(self, text: str) -> None:
        """Append a line to the trace."""
        task = here()
        name = "nobody" if task is None else task.name
        self.trace.append(f"{self.now / NS:.9f} {name}: {text}")

    def choose(self, among: int) -> int:
        """Return a number below `among`, by the seed."""
        return self._random.randrange(among) if among > 1 else 0

    def chance(self) -> float:
        """Return a number from 0 to 1, by the seed."""
        return self._random.random()

    def of_rank(self, rank: int) -> list[Task]:
        """Return the tasks of a rank that have not ended."""
        return list(self._alive.get(rank, ()))

    def live(self, task: Task, run: Action) -> None:
        """Run a task from start to end, in its own thread."""
        task.gate.acquire()
        task.ident = _thread.get_ident()
        try:
            with as_task(task):
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
    def _me(self) -> Task:
        task = here()
        assert task is not None, "only a task of the simulation can wait in it"
        if self._over:
            raise EndedError
        return task

    def _switch_to(self, task: Task) -> None:
        following = self._choose()
        if following is not task:
            self._pass_to(following)
            task.gate.acquire()
        self._raise_pending(task)

    def _raise_pending(self, task: Task) -> None:
        if task.pending is not None:
            error = task.pending
            task.pending = None
            raise error

    def _pass_to(self, task: Task | None) -> None:
        self._running = task
        (self._driver if task is None else task.gate).release()

    def _choose(self) -> Task | None:
        """Return the task to run next; None if the simulation is over."""
        self._turns += 1
        while not self._over and self._left:
            if self._ready:
                task = self._ready.pop(self.choose(len(self._ready)))
                if task.rank is not None and task.rank != self._rank:
                    self._on_rank(self._rank, task.rank)
                    self._rank = task.rank
                return task
            self._advance()
        return None

    def _advance(self) -> None:
        """Advance time until a task can run: none can now."""
        found = self._calendar.next()
        if found is None:
            self._break_deadlock()
        else:
            when, event = found
            self.now = max(self.now, when)
            event.fire(self.wake)

    def _break_deadlock(self) -> None:
        ranks = {rank: list(tasks) for rank, tasks in self._alive.items() if rank is not None}
        report, operations = deadlock_report(ranks, self.now / NS)
        self.trace.append(f"{self.now / NS:.9f} deadlock: {report}")
        for rank, tasks in ranks.items():
            for task in filter(lambda task: task.main, tasks):
                error = DeadlockError(report, rank=rank, size=self._mains, operation=operations.get(rank))
                self.throw(task, error)

    def _tick(self) -> None:
        """Body of the clock task: run all due actions."""
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
        """End every remaining thread, at its wait."""
        self._over = True
        if self._running is not None and not self._driver.acquire(timeout=_LEAVE_S):
            return
        for task in self._tasks:
            if not task.done:
                task.pending = EndedError()
                task.gate.release()
                self._driver.acquire()
        for task in self._tasks:
            if task.thread is not None:
                task.thread.join(_LEAVE_S)
