"""Stops all ranks at the same training step, on a signal, a deadline, a file, or a request from the program.

    for batch in un.stop.batches(comm, loader):
        train(batch)
    ...
    sys.exit(un.stop.exit_status(comm))

`Communicator.stop_requested` counts steps and decides at which step ranks stop. This module provides the sources of
stop requests, and the exit status for the job script.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, TypeVar

from unisono.communicator import Communicator, boundaries_of, engine_of
from unisono.core import clock
from unisono.core.closing import Closing
from unisono.core.step_boundaries import STOPPED_SAVED, STOPPED_UNSAVED
from unisono.errors import CommError

__all__ = ["STOPPED_SAVED", "STOPPED_UNSAVED", "StopSources", "batches", "enable", "exit_status"]

T = TypeVar("T")

_LOOK_EVERY_S = 0.5
_DUPLICATE_S = 1.0
"""Seconds within which a repeated signal is ignored: a scheduler and a launcher may both send it."""


def batches(comm: Communicator, batches: Iterable[T]) -> Iterator[T]:
    """Yield batches until the loader is exhausted, or until all ranks stop at the same step.

    A step is counted before its batch is fetched, so after a stop, a resumable loader continues with the first unused
    batch. If `enable` was not called for the communicator, Slurm's time limit requests a stop, and so does SIGTERM
    unless it already has a handler.

    Args:
        comm: Communicator of the ranks that stop together. All ranks of `comm` must call `batches`, either with loaders
            of equal length or inside `averager.join()`.
        batches: A loader, or any other iterable.

    Raises:
        CommError: As for `comm.stop_requested`.

    Example:
        >>> def program(comm):
        ...     done = []
        ...     for batch in un.stop.batches(comm, range(100)):
        ...         comm.barrier()
        ...         done.append(batch)
        ...         if batch == 2 and comm.rank == 1:
        ...             comm.request_stop("that is enough")
        ...     return done
        >>> first, second = un.launch(program, nprocs=2, backend="thread")
        >>> first == second
        True
    """
    if not boundaries_of(comm).followers:
        free = _is_main_thread() and _handler(signal.SIGTERM) is signal.SIG_DFL
        enable(comm, [signal.SIGTERM] if free else [])
    iterator = iter(batches)
    while not comm.stop_requested():
        try:
            batch = next(iterator)
        except StopIteration:
            return
        yield batch


def enable(
    comm: Communicator,
    signals: Iterable[int] = (signal.SIGTERM,),
    *,
    after_s: float | None = None,
    before_limit_s: float | None = 60.0,
    file: str | os.PathLike[str] | None = None,
) -> StopSources:
    """Request a stop on a signal to this process, at a deadline, or once a file exists, until `comm` is closed.

    Call this on one or more ranks: the first request on any rank counts. After `comm.rebuild`, requests go to the new
    communicator.

    Args:
        comm: The communicator whose `stop_requested` returns True after a request.
        signals: Signals that request a stop. A previously installed handler is also called, except Python's own SIGINT
            handler. If a signal is repeated after 1 s or more, it goes only to the previous handler, or terminates the
            process if there was none.
        after_s: Seconds from now until the stop.
        before_limit_s: How many seconds before a Slurm job's time limit ($SLURM_JOB_END_TIME) to stop; None to ignore
            the limit.
        file: Path of a file that requests a stop once it exists; checked twice a second.

    Returns:
        A context manager; its `close` disables the sources that `enable` set up.

    Raises:
        ClosedError: The communicator is closed.
        ValueError: A signal cannot be handled in Python, or `after_s` is negative.
        RuntimeError: Signals were passed outside the main thread, for example on a rank of backend "thread". Instead of
            passing signals, call `comm.request_stop` from a handler installed in the main thread.

    Example:
        >>> import os, signal
        >>> with un.init() as comm, un.stop.enable(comm, [signal.SIGUSR1]):
        ...     for step in un.stop.batches(comm, range(10**9)):
        ...         if step == 3:
        ...             os.kill(os.getpid(), signal.SIGUSR1)
        ...     comm.stop_reason
        'signal SIGUSR1'
    """
    engine_of(comm.latest).failures.check_open("stop.enable")
    if after_s is not None and not after_s >= 0:
        raise ValueError(f"after_s must be a number of seconds, not {after_s}")
    deadlines = {} if after_s is None else {f"{after_s:g} s have passed": time.time() + after_s}
    limit = os.environ.get("SLURM_JOB_END_TIME", "")
    if before_limit_s is not None and limit.isdecimal():
        deadlines[f"the time limit of the Slurm job is near ({before_limit_s:g} s)"] = int(limit) - before_limit_s
    return StopSources(comm, [signal.Signals(number) for number in signals], deadlines, file)


def exit_status(comm: Communicator, *, saved: bool | None = None) -> int:
    """Return the exit status from which a job script decides whether to restart the training.

    Args:
        comm: The communicator that may have stopped; it may already be closed.
        saved: Whether a checkpoint of the last step is complete. If None, a checkpoint counts only if a `Checkpointer`
            of this communicator has saved the last step.

    Returns:
        0 if training was not stopped; 75 (`STOPPED_SAVED`; EX_TEMPFAIL in sysexits.h) if training was stopped and a
        checkpoint of the last step is complete; 74 (`STOPPED_UNSAVED`; EX_IOERR) if training was stopped without such a
        checkpoint.

    Example:
        >>> with un.init() as comm:
        ...     comm.request_stop()
        ...     while not comm.stop_requested():
        ...         pass
        >>> un.stop.exit_status(comm), un.stop.exit_status(comm, saved=True)
        (74, 75)
    """
    if comm.stop_reason is None:
        return 0
    return STOPPED_SAVED if (boundaries_of(comm).saved if saved is None else saved) else STOPPED_UNSAVED


class StopSources(Closing):
    """Sources of stop requests for one communicator, as returned by `enable`.

    The signal handler only puts the reason into a queue, so it may safely interrupt any code. A dedicated thread reads
    the queue, checks the deadlines and the file, and repeats the request until the control plane has received it.

    The signal handler passes signals on to the previous handler after `close`, and in a forked process, which has no
    thread to read the queue. `close` may leave the signal handler installed: only the main thread can remove it, and
    only if no other handler was installed later.

    Args:
        comm: The communicator.
        signals: The signals.
        deadlines: Wall-clock times at which to stop; the key is the reason.
        file: Path of the file that requests a stop once it exists.

    Example:
        >>> with un.init() as comm:
        ...     sources = un.stop.enable(comm, [], after_s=0)
        ...     for _ in un.stop.batches(comm, iter(int, 1)):
        ...         pass
        ...     sources.close()
        ...     comm.stop_reason
        '0 s have passed'
    """

    def __init__(
        self,
        comm: Communicator,
        signals: Sequence[signal.Signals],
        deadlines: dict[str, float],
        file: str | os.PathLike[str] | None,
    ) -> None:
        if signals and not _is_main_thread():
            raise RuntimeError(
                "signals reach the main thread of a process only. Call un.stop.enable there, or let a handler that is "
                "installed there call comm.request_stop(reason)"
            )
        self._deadlines = deadlines
        self._file = file
        # SimpleQueue's `put` is reentrant, so a signal handler may interrupt another handler's `put`.
        self._events: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._since: dict[int, float] = {}
        self._before: dict[int, Any] = {}
        self._pid = os.getpid()
        self._closed = False
        for number in signals:
            before = _handler(number)
            try:
                if before is None:
                    raise ValueError("it has a handler that was not installed by Python")
                signal.signal(number, self._on_signal)
            except (OSError, ValueError) as error:
                self._restore()
                raise ValueError(f"{number.name} cannot request a stop: {error}") from error
            self._before[number] = before
        self._follow(comm.latest)
        boundaries_of(comm).followers.append(self._follow)
        comm.latest.before_close(self.close)
        self._thread = threading.Thread(target=self._run, name="unisono-stop", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Disable these sources, and restore the signal handlers. Idempotent."""
        self._closed = True
        self._events.put(None)
        self._restore()

    def _follow(self, comm: Communicator) -> None:
        """From now on, send stop requests to this communicator."""
        self._comm = weakref.ref(comm, self._on_drop)

    def _on_drop(self, dropped: weakref.ref[Communicator]) -> None:
        # Stop the thread here, because a communicator that is dropped without `close` is closed in the background, and
        # its `before_close` callbacks do not run.
        if dropped is self._comm:
            self._events.put(None)

    def _restore(self) -> None:
        for number, before in self._before.items() if _is_main_thread() else ():
            # If the previous handler would terminate the process, keep our handler: a scheduler may repeat its signal
            # while ranks shut down, which must not kill ranks that have stopped as requested.
            lingers = number in self._since and before in (signal.SIG_DFL, signal.default_int_handler)
            if not lingers and signal.getsignal(number) == self._on_signal:
                signal.signal(number, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = clock.now()
        before = self._before[number]
        forked = os.getpid() != self._pid
        if not self._closed and not forked:
            self._since.setdefault(number, now)
        if forked or now - self._since.get(number, -_DUPLICATE_S) > _DUPLICATE_S:
            signal.signal(number, before)
            os.kill(os.getpid(), number)
            return
        self._events.put(f"signal {signal.Signals(number).name}")
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _run(self) -> None:
        reason: str | None = None
        while True:
            waits = reason is None and not self._deadlines and self._file is None
            try:
                event = self._events.get(timeout=None if waits else _LOOK_EVERY_S)
                if event is None:
                    return
                reason = reason or event
            except queue.Empty:
                reason = reason or self._due()
            if reason is not None and self._request(reason):
                reason = self._file = None
                self._deadlines = {}

    def _due(self) -> str | None:
        """Return the reason to stop now, if there is one."""
        passed = [reason for reason, when in self._deadlines.items() if time.time() >= when]
        # Don't use `Path.exists`: it may raise errors, which would end this thread.
        if self._file is not None and os.path.exists(self._file):  # noqa: PTH110
            passed.append(f"the file {os.fspath(self._file)} exists")
        return passed[0] if passed else None

    def _request(self, reason: str) -> bool:
        """Request a stop of the current communicator; return whether the control plane has received it."""
        comm = self._comm()
        try:
            if comm is not None:
                comm.request_stop(reason)
        except CommError:
            # The control plane is lost or busy. Retry, because the ranks may be rebuilding the communicator; if they
            # are not, their own calls also fail.
            return False
        return True


def _handler(number: int) -> Any:
    """Return a signal's handler, skipping the handlers of closed `StopSources`."""
    found = signal.getsignal(number)
    while isinstance(owner := getattr(found, "__self__", None), StopSources) and owner._closed:
        found = owner._before[number]
    return found


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
