"""Ranks started once and reused for many small programs."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any, Literal, Self

from unisono.launcher.job import conclude
from unisono.serialization.functions import FunctionPickler, dumps
from unisono.testing.pool_processes import PoolProcesses
from unisono.testing.pool_threads import run_limited
from unisono.testing.ranks import TIMEOUT_S, run_ranks
from unisono.transports.hierarchical import transport_named

__all__ = ["RankPool", "close_pools", "pool"]

_LIMIT_S = 60.0
_KEPT = 8


class RankPool:
    """Ranks reused for many small programs: about a millisecond each, where starting ranks takes a second.

    Each program finds torch's random generator as new. After an error that a program itself raises, the next one
    gets a new communicator. Ranks that failed in another way, that took too long, or whose driver has changed
    its environment, folder or standard output since they started, are replaced.
    With a backend that runs ranks as threads, each program gets its own ranks, at no cost.

    Args:
        size: Number of ranks; a program may use fewer.
        backend: A transport's name.
        limit_s: Total seconds that one program may take. Ranks that take longer are ended, and the
            error contains the stack of each.
        options: Options of `unisono.launch`; `timeout` defaults to 10 s.

    Attributes:
        size, backend: As given.

    Example:
        >>> with RankPool(4, "thread") as ranks:
        ...     ranks.run(lambda comm, x: comm.rank * x, 10), ranks.run(lambda comm: comm.size, size=2)
        ([0, 10, 20, 30], [2, 2])
    """

    def __init__(self, size: int, backend: str = "gloo", *, limit_s: float = _LIMIT_S, **options: Any) -> None:
        self.size, self.backend = size, backend
        self._limit_s, self._options = limit_s, {"timeout": TIMEOUT_S, **options}
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
        """Return each rank's `fn(comm, *args)`, on the first `size` ranks (all if None); the others idle.

        Args:
            fn: The program. It is pickled by value, as are `args`: they need not be importable.
            args: Passed to the program, the same on every rank.
            size: Number of participating ranks, in a communicator of their own.
            on_failure: As for `unisono.launch`.

        Raises:
            Exception: What the first failing rank raised, with that rank's traceback before it.
            CommTimeoutError: The program took longer than the pool's `limit_s`.
            ValueError: `size` is less than 1 or more than the pool's.
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
            staff, self._staff = self._ready(), None
            ended, usable = staff.run(program, size, self._limit_s, on_failure)
            if usable:
                self._staff = staff
        return conclude(ended, size, on_failure)

    def _ready(self) -> PoolProcesses:
        """Return running ranks: new ones if there are none, or the driver's surroundings have changed."""
        here = _surroundings()
        if self._staff is not None and here == self._started_in:
            return self._staff
        if self._staff is not None:
            self._staff.close()
        self._started_in = here
        return PoolProcesses(self.size, self.backend, self._options)

    def close(self) -> None:
        """End the ranks. Idempotent; a later `run` starts new ones."""
        with self._lock:
            staff, self._staff = self._staff, None
        if staff is not None:
            staff.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_pools: OrderedDict[str, RankPool] = OrderedDict()


def pool(backend: str = "gloo", size: int = 4, **options: Any) -> RankPool:
    """Return this process's pool for these arguments; its ranks end with the process.

    Ranks of the 8 pools used last are kept.

    Args:
        backend, size, options: As in `RankPool`. Their text, by `repr`, selects the pool.

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
    """End the ranks of all pools that `pool` returned."""
    while _pools:
        _pools.popitem()[1].close()


def _surroundings() -> Any:
    """Return what ranks take over from their driver when they start."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return environment, Path.cwd(), [_file(number) for number in (1, 2)]


def _file(number: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _of_the_first(size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options for a launch of fewer ranks: hosts keep their remaining ranks."""
    hosts = options.get("hosts")
    if hosts is None:
        return options
    left = (tuple(rank for rank in ranks if rank < size) for ranks in hosts)
    return {**options, "hosts": tuple(ranks for ranks in left if ranks)}


def _by_value(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle the program by value: a test's module is often not importable in a rank, so its code is included."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    importable = module is None or module.__name__.partition(".")[0] in ("unisono", "__main__")
    return dumps((fn, args), None if importable else module, _Pickler)


class _Pickler(FunctionPickler):
    """A pickler that sends tests without the machinery of Hypothesis around them, which cannot be pickled."""

    def reducer_override(self, obj: Any) -> Any:
        handle = getattr(obj, "hypothesis", None) if isinstance(obj, FunctionType) else None
        return super().reducer_override(obj if handle is None else handle.inner_test)
