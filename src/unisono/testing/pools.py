"""Ranks that are started once and reused for many small programs."""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, Literal
from unittest import TestCase

from unisono.core.closing import Closing
from unisono.errors import CommError
from unisono.launcher.api import job_of, linked_ranks
from unisono.launcher.job import conclude, first_failure
from unisono.launcher.supervisor import Outcome, Supervisor
from unisono.serialization.functions import FunctionPickler, dumps
from unisono.testing import pool_worker
from unisono.testing.namespaced_ranks import TIMEOUT_S, run_ranks
from unisono.testing.pool_threads import LIBRARY, overdue, run_limited, where
from unisono.testing.pool_worker import LEAVE, serve
from unisono.transports.hierarchical import transport_named

__all__ = ["PoolProcesses", "RankPool", "close_pools", "pool"]

_LIMIT_S = 60.0
_KEPT = 8


class RankPool(Closing):
    """Ranks reused for many small programs: a program takes about a millisecond, but starting ranks takes a second.

    Each program starts with torch's random generator freshly seeded. After an error raised by a program itself, the
    next program gets a new communicator; after any other failure or a timeout, it gets new ranks. Ranks are also
    replaced if the driver has changed its environment, working directory or standard output since they started. With a
    backend that runs ranks as threads, each program gets new ranks, which costs little.

    Args:
        size: Number of ranks; a program may use fewer.
        backend: A transport's name.
        limit_s: Time limit of one program in seconds. Ranks that take longer are killed, and the error contains the
            stack of each rank.
        options: Options of `unisono.launch`; `timeout` defaults to 10 s.

    Attributes:
        size, backend: As given.

    Example:
        >>> with RankPool(4, "thread") as ranks:
        ...     ranks.run(lambda comm, x: comm.rank * x, 10), ranks.run(lambda comm: comm.size, size=2)
        ([0, 10, 20, 30], [2, 2])
    """

    def __init__(self, size: int, backend: str = "gloo", *, limit_s: float = _LIMIT_S, **options: Any) -> None:
        self.size = size
        self.backend = backend
        self._limit_s = limit_s
        self._options = {"timeout": TIMEOUT_S, **options}
        self._staff: PoolProcesses | None = None
        self._started_in: Any = None
        self._lock = threading.Lock()

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        size: int | None = None,
        on_failure: Literal["end", "continue"] = "end",
    ) -> list[Any]:
        """Return the results of `fn(comm, *args)` on the first `size` ranks (default: all). Other ranks stay idle.

        Args:
            fn: The program; pickled by value, like `args`, so it need not be importable.
            args: Passed to the program, the same on every rank.
            size: Number of participating ranks, which get their own communicator.
            on_failure: As for `unisono.launch`.

        Raises:
            Exception: The first failing rank's error, preceded by its traceback.
            CommTimeoutError: The program took longer than the pool's `limit_s`.
            ValueError: `size` is less than 1, or more than the size of the pool.
        """
        size = self.size if size is None else size
        if not 1 <= size <= self.size:
            raise ValueError(f"size={size}, but this pool has {self.size} ranks; ask for 1 to {self.size}")
        transport = transport_named(self.backend)
        if transport.in_process:
            options = {**_of_the_first(size, self._options), "on_failure": on_failure}
            if transport.simulated:
                return run_ranks(fn, size, self.backend, *args, **options)
            return run_limited(fn, size, self.backend, args, self._limit_s, options)
        program = _by_value(fn, args)
        with self._lock:
            staff = self._ready()
            self._staff = None
            ended, usable = staff.run(program, size, self._limit_s, on_failure)
            if usable:
                self._staff = staff
        return conclude(ended, size, on_failure)

    def _ready(self) -> PoolProcesses:
        """Return running ranks; start new ranks if none are running or if the driver's environment has changed."""
        here = _surroundings()
        if self._staff is not None and here == self._started_in:
            return self._staff
        if self._staff is not None:
            self._staff.close()
        self._started_in = here
        return PoolProcesses(self.size, self.backend, self._options)

    def close(self) -> None:
        """Stop the ranks. Idempotent; a later `run` starts new ranks."""
        with self._lock:
            staff = self._staff
            self._staff = None
        if staff is not None:
            staff.close()


_pools: OrderedDict[str, RankPool] = OrderedDict()
"""Pools of this process, most recently used last; shared between tests, because starting ranks takes a second."""


def pool(backend: str = "gloo", size: int = 4, **options: Any) -> RankPool:
    """Return this process's pool for the given arguments; its ranks exit with the process.

    Ranks of the 8 most recently used pools are kept.

    Args:
        backend, size, options: As in `RankPool`. Arguments with equal `repr`s select the same pool.

    Example:
        >>> pool("thread") is pool("thread")
        True
    """
    key = repr((backend, size, sorted(options.items())))
    if key not in _pools:
        _pools[key] = RankPool(size, backend, **options)
    _pools.move_to_end(key)
    while len(_pools) > _KEPT:
        _pools.popitem(last=False)[1].close()
    return _pools[key]


@atexit.register
def close_pools() -> None:
    """Stop the ranks of all pools that `pool` returned."""
    while _pools:
        _pools.popitem()[1].close()


def _surroundings() -> Any:
    """Return everything that ranks inherit from their driver when they start."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return environment, Path.cwd(), [_file(number) for number in (1, 2)]


def _file(number: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _of_the_first(size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options for launching fewer ranks: the other ranks are removed from `hosts`."""
    hosts = options.get("hosts")
    if hosts is None:
        return options
    left = (tuple(rank for rank in ranks if rank < size) for ranks in hosts)
    return {**options, "hosts": tuple(ranks for ranks in left if ranks)}


def _by_value(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle the program by value: a test's module is often not importable in a rank, so its code is included."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    importable = module is None or module.__name__.partition(".")[0] in ("unisono", "__main__")
    return dumps((fn, args), None if importable else module, _TestPickler)


class _TestPickler(FunctionPickler):
    """Pickler for tests that omits Hypothesis' wrapper and unittest's outcome, because they refer to open files."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, TestCase):
            return object.__new__, (type(obj),), {**vars(obj), "_outcome": None}
        handle = getattr(obj, "hypothesis", None) if isinstance(obj, FunctionType) else None
        return super().reducer_override(obj if handle is None else handle.inner_test)


_DUMP_S = 0.5
_LEAVE_S = 10.0


class PoolProcesses:
    """Running ranks, each waiting for programs on its connection.

    The constructor starts the ranks, which exit on `close`, or when this process exits.
    """

    def __init__(self, size: int, backend: str, options: dict[str, Any]) -> None:
        self._size = size
        self._failures = 0
        self._connected: set[tuple[int, int]] = set()
        self._folder = tempfile.TemporaryDirectory(prefix="unisono-pool-")
        given = {**options}
        threads = given.pop("threads", None)
        job = job_of(serve, size, backend, (self._folder.name,), **given)
        self._ranks = linked_ranks(job, size, "continue", threads)
        try:
            ended = Supervisor(self._ranks.start, self._ranks.ends, range(size), "end").run()
            self._pids: list[int] = conclude(ended, size, "end")
        except BaseException:
            self.close()
            raise

    def run(self, program: bytes, size: int, limit_s: float, on_failure: str) -> tuple[list[Outcome], bool]:
        """Return the first `size` ranks' outcomes, in order of completion, and whether the ranks are still usable.

        Unusable ranks have already been stopped. Ranks remain usable after an error raised by the program itself.
        """
        key = size, self._failures
        # The communicator of the first `size` ranks is created once, and again after a failure; all ranks take part in
        # its creation.
        called = size if key in self._connected else self._size
        self._connected.add(key)
        order = pickle.dumps((*key, program))
        self._usable = True
        self._ranks.running.update(range(size))
        try:
            # Send inside the `try` block, because the caller may be interrupted while ranks run the program.
            for rank in range(size, called):
                self._send(order, rank)
            ended = Supervisor(partial(self._send, order), self._ends, range(size), on_failure).run(limit_s)
        except BaseException as error:
            error.add_note(where(self._stop()))
            raise
        if pending := sorted(self._ranks.running):
            late = overdue(limit_s, self._stop())
            return [*ended, *(Outcome(rank, error=late) for rank in pending)], False
        failed = any(outcome.error is not None for outcome in ended)
        self._failures += failed
        if not isinstance(first_failure(ended).error, CommError) if failed else self._usable:
            return ended, True
        self.close()
        return ended, False

    def _send(self, order: bytes, rank: int, attempt: int = 0) -> None:
        # Ignore that a rank has exited since its last program: the wait for its outcome reports the exit.
        with suppress(ConnectionError):
            self._ranks.links[rank].send_bytes(order)

    def _ends(self, limit_s: float | None) -> list[Outcome]:
        """Return the program's outcomes, and record whether the ranks' communicators are still usable."""
        ended = self._ranks.ends(limit_s)
        for outcome in ended:
            try:
                usable = self._ranks.links[outcome.rank].recv()
            except (EOFError, OSError):
                # Without a second message, the first message was not the outcome of the program, but reported that the
                # rank had exited.
                outcome.reported = usable = False
            self._usable = self._usable and usable
        return ended

    def _stop(self) -> dict[int, str]:
        """Kill all ranks; return the stacks of ranks that are running a program."""
        ranks = sorted(self._ranks.running)
        self._signal(ranks, signal.SIGUSR1)
        time.sleep(_DUMP_S)
        stacks = {rank: _shown((Path(self._folder.name) / f"stacks-{rank}").read_text()) for rank in ranks}
        self._signal(range(self._size), signal.SIGKILL)
        self._release()
        return stacks

    def close(self) -> None:
        """Tell the ranks to exit, and wait until they have exited."""
        self._ranks.running.update(self._ranks.links)
        try:
            Supervisor(partial(self._send, LEAVE), self._ranks.ends, self._ranks.links, "continue").run(_LEAVE_S)
        finally:
            self._release()

    def _release(self) -> None:
        self._ranks.close()
        self._folder.cleanup()

    def _signal(self, ranks: Iterable[int], number: signal.Signals) -> None:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self._pids[rank], number)


def _shown(dump: str) -> str:
    """Return the program's frames from a dump of all threads, without the library's frames."""
    for thread in dump.split("\n\n"):
        above, found, _ = thread.partition(f'File "{pool_worker.__file__}"')
        if found:
            return "\n".join(line for line in reversed(above.splitlines()) if 'File "' in line and LIBRARY not in line)
    return dump
