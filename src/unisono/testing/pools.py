"""Ranks that are started once and reused for many small programs."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Any, Literal, Self

import cloudpickle

from unisono.launcher.job import conclude
from unisono.testing.pool_processes import PoolProcesses
from unisono.testing.ranks import TIMEOUT_S, run_ranks
from unisono.transports.hierarchical import transport_named

__all__ = ["RankPool", "pool"]

_LIMIT_S = 60.0


class RankPool:
    """Many small programs on the same ranks: about a millisecond each, where starting ranks takes a second.

    A failure that leaves a communicator broken ends these ranks; the next program gets fresh ones.
    With a backend whose ranks are threads, each program gets ranks of its own: those cost nothing.

    Args:
        size: How many ranks there are; a program may ask for fewer.
        backend: A transport's name.
        limit_s: Seconds that one program may take in all. Ranks that take longer are ended, and where
            each of them was is part of the error.
        options: Of `unisono.launch`; `timeout` is 10 s unless given.

    Example:
        >>> with RankPool(4, "thread") as ranks:
        ...     ranks.run(lambda comm, x: comm.rank * x, 10), ranks.run(lambda comm: comm.size, size=2)
        ([0, 10, 20, 30], [2, 2])
    """

    def __init__(self, size: int, backend: str = "gloo", *, limit_s: float = _LIMIT_S, **options: Any) -> None:
        self.size, self.backend = size, backend
        self._limit_s, self._options = limit_s, {"timeout": TIMEOUT_S, **options}
        self._staff: PoolProcesses | None = None
        self._lock = threading.Lock()

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        size: int | None = None,
        on_failure: Literal["end", "continue"] = "end",
    ) -> list[Any]:
        """Each rank's `fn(comm, *args)`, on the first `size` ranks (all if None); the others idle.

        Args:
            fn: The program. It travels by value, as do `args`: they need not be importable.
            args: Passed on, the same to every rank.
            size: How many ranks take part, in a communicator of their own.
            on_failure: As for `unisono.launch`.

        Raises:
            Exception: What the first failing rank raised, with that rank's traceback before it.
            CommTimeoutError: The program took longer than the pool's `limit_s`.
        """
        size = self.size if size is None else size
        if not 1 <= size <= self.size:
            raise ValueError(f"size={size}, but this pool has {self.size} ranks; ask for 1 to {self.size}")
        if transport_named(self.backend).in_process:
            return run_ranks(fn, size, self.backend, *args, on_failure=on_failure, **_of_the_first(size, self._options))
        program = _by_value(fn, args)
        with self._lock:
            if self._staff is None:
                self._staff = PoolProcesses(self.size, self.backend, self._options)
            ended, usable = self._staff.run(program, size, self._limit_s)
            if not usable:
                self._staff = None
        return conclude(ended, size, on_failure)

    def close(self) -> None:
        """End the ranks. Again is harmless, and a later `run` starts new ones."""
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


_pools: dict[Hashable, RankPool] = {}


def pool(backend: str = "gloo", size: int = 4, **options: Any) -> RankPool:
    """The pool of this process for these arguments; its ranks end when the process does.

    Example:
        >>> pool("thread") is pool("thread")
        True
    """
    key = (backend, size, tuple(sorted(options.items())))
    if key not in _pools:
        _pools[key] = RankPool(size, backend, **options)
        atexit.register(_pools[key].close)
    return _pools[key]


def _of_the_first(size: int, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a launch of fewer ranks: hosts keep those that are left."""
    hosts = options.get("hosts")
    if hosts is None:
        return options
    left = (tuple(rank for rank in ranks if rank < size) for ranks in hosts)
    return {**options, "hosts": tuple(ranks for ranks in left if ranks)}


def _by_value(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The program as bytes. A test's module is often not importable in a rank, so its code goes along."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    if module is None or module.__name__.partition(".")[0] in ("unisono", "__main__"):
        return bytes(cloudpickle.dumps((fn, args)))
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps((fn, args)))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
