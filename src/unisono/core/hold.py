"""Ranks held by a debugger: they wait at their next library call, and the library's clock is stopped."""

from __future__ import annotations

import _thread
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FrameType
from typing import Any, Protocol

from unisono.core import clock
from unisono.core.control import ControlPlane
from unisono.core.flight_recorder import Activity, users_frame
from unisono.host.native import native

__all__ = ["HOLD", "SUSPENDABLE", "Hold", "can_hold", "hold_ranks"]

SUSPENDABLE = frozenset({"thread", "shm", "tcp", "sim"})
"""Backends whose deadlines stop while a debugger holds the ranks."""


class _Holdable(Protocol):
    """Attributes of an engine that `Hold` uses."""

    owner: int | None
    activity: Activity


class Hold:
    """A debugger's hold on the ranks of this process. Uses bare `_thread` locks, which also work in simulations.

    Attributes:
        held: Whether the ranks are held.
        on_go: Called before the ranks are released, in the thread that releases them.
    """

    def __init__(self) -> None:
        self.held: bool = False
        self.on_go: list[Callable[[], None]] = []
        self._engines: weakref.WeakValueDictionary[int, _Holdable] = weakref.WeakValueDictionary()
        # The held engines, including those that are released for a single step.
        self._held: list[_Holdable] = []
        # By held thread: the lock at which the thread waits, and the activity of the communicator that it called.
        self._gates: dict[int, tuple[_thread.LockType, Activity]] = {}
        self._steps: set[int] = set()
        # The control plane's thread calls `stop` and `go`, and must not wait for a rank, so no thread holds this lock
        # while it waits at its gate.
        self._lock = _thread.allocate_lock()

    def add(self, engine: _Holdable) -> None:
        """Register an engine, which `stop` can hold for as long as the engine exists."""
        self._engines[id(engine)] = engine

    def engines_of(self, thread: int) -> list[Any]:
        """Return the open engines that a thread owns, including held ones, largest group first."""
        # Skip closed engines: thread identifiers are reused, so an exited thread with this identifier may have left
        # engines behind.
        found = [e for e in self._known() if e.activity.owner == thread and not e.activity.life.closed]
        return sorted(found, key=lambda engine: -engine.activity.group.size)

    def _known(self) -> list[_Holdable]:
        """Return all engines that exist, oldest first."""
        # Use `valuerefs`, which copies the references in one step: iterating would raise if another thread created a
        # communicator meanwhile, and a lock would block a signal handler or a forked child that creates one.
        return [engine for ref in self._engines.valuerefs() if (engine := ref()) is not None]

    def stop(self, activities: Iterable[Activity] | None) -> None:
        """Hold the engines with these activities. With None, hold only the threads that call `wait` (simulated ranks).

        Ranks that are waiting in a call keep waiting, with their deadlines suspended.
        """
        with self._lock:
            if activities is not None:
                # Stop the clock first: a rank that waits for a held rank must not reach its deadline.
                _set_core(clock.stop())
                known = set(map(id, activities))
                for engine in self._known():
                    # If `stop` is called twice, `change` returns False for engines that are held already, so they are
                    # listed once.
                    if id(engine.activity) in known and engine.activity.life.change("hold"):
                        self._held.append(engine)
            self.held = True

    def go(self) -> None:
        """Release all held ranks."""
        # Call the observers first: they close the debugger's socket, through which any code can be run, before the
        # ranks continue. Call them without the lock, because they take their own locks.
        for observe in self.on_go:
            observe()
        with self._lock:
            self.held = False
            for engine in self._held:
                engine.activity.life.change("go")
            self._held.clear()
            _set_core(clock.go())
            gates = list(self._gates.values())
            self._gates.clear()
        for gate, _ in gates:
            gate.release()

    def step(self, thread: int) -> bool:
        """Let a held thread run to its next line; return whether the thread was held."""
        with self._lock:
            gate, _ = self._gates.pop(thread, (None, None))
            if gate is None:
                return False
            self._steps.add(thread)
            for engine in self._held:
                # Also release engines without an owner: this thread's next line may make the first call on their
                # communicator.
                if engine.owner in (thread, None):
                    engine.activity.life.change("go")
        gate.release()
        return True

    def holds(self, activity: Activity) -> bool:
        """Return whether the engine of an activity is held."""
        return any(engine.activity is activity for engine in list(self._held))

    def waits(self, thread: int) -> bool:
        """Return whether a thread is held in `wait`, and so can be stepped."""
        return thread in self._gates

    def thread_in(self, activities: Sequence[Activity]) -> int | None:
        """Return the thread that was held last in a call of one of these communicators; None if there is none."""
        # Copy in one step, because an interrupted thread may remove its gate at any time.
        return next((thread for thread, (_, at) in reversed(list(self._gates.items())) if at in activities), None)

    def wait(self, activity: Activity) -> None:
        """Wait until all ranks continue or this thread is stepped. `activity` belongs to the communicator in use."""
        here = _thread.get_ident()
        gate = _thread.allocate_lock()
        with self._lock:
            if not self.held:
                return
            # Register the gate under the lock: then either `go` finds the gate, or this thread finds `held` False.
            gate.acquire()
            self._gates[here] = gate, activity
            # Suspend the engines that `step` has resumed.
            for engine in self._held:
                # Also suspend engines without an owner: `step` released them, because this thread may use them first.
                if engine.owner in (here, None):
                    engine.activity.life.change("hold")
        try:
            gate.acquire()
        finally:
            # After an interrupt, the gate is still registered, so remove it.
            self._gates.pop(here, None)
        if here in self._steps:
            self._steps.discard(here)
            _call_at_next_line(users_frame(sys._getframe(1)), partial(self.wait, activity))


HOLD = Hold()
"""The process has one hold, because it has one clock."""


def can_hold(backend: str) -> bool:
    """Return whether a backend's deadlines can be suspended, so that a debugger can hold its ranks."""
    return sys.platform == "linux" and set(backend.split("+")) <= SUSPENDABLE


def hold_ranks(control: ControlPlane, activity: Activity, why: str, show: Callable[[], None] | None = None) -> None:
    """Hold all ranks for a debugger, and return when it releases them.

    Args:
        control: Control plane of the ranks.
        activity: This rank's activity in a group.
        why: What happened on this rank.
        show: Function that opens the debugger's prompt in this process; None to let the user attach a debugger.
    """
    group = activity.group
    rank = group.members[group.rank]
    control.hold(f"rank {rank} {why}")
    if show is None:
        sys.stderr.write(f"rank {rank} {why}. All ranks are held; attach with: unisono debug {os.getpid()}\n")
        sys.stderr.flush()
    else:
        show()
    HOLD.wait(activity)


def _set_core(stands: tuple[float, float | None]) -> None:
    """Pass the clock's state to the native core, whose loops check deadlines without Python."""
    stood_s, stopped_at = stands
    core = native()
    if core is not None:
        core.stop_deadlines(stood_s, -1.0 if stopped_at is None else stopped_at)


def _call_at_next_line(frame: FrameType | None, action: Callable[[], None]) -> None:
    """Call `action` in this thread before the next line of a frame, or of its caller if the frame returns first."""
    before = sys.gettrace()

    def trace(here: FrameType, event: str, argument: Any) -> Any:
        if here is not stop[0]:
            return None
        if event == "return":
            stop[0] = here.f_back
            if stop[0] is not None:
                stop[0].f_trace = trace
        elif event == "line":
            here.f_trace = None
            # Restore the program's own trace function before `action` blocks.
            sys.settrace(before)
            action()
            return None
        return trace

    stop = [frame]
    if frame is not None:
        # `settrace` only affects frames that begin later, and this frame is already running.
        frame.f_trace = trace
        sys.settrace(trace)
