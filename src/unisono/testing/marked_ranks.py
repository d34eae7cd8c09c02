"""Ranks on which tests run, optionally with torch's default group. Slow imports are deferred until a test runs."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.communicator import Communicator

__all__ = ["MarkedRanks", "torch_ranks"]

_SHRINKING_S = 0.2
"""Minimum timeout of a Hypothesis example after another example of the test has timed out."""
_SLACK = 20
"""Timeout of such an example, as a multiple of the duration of the fastest example that passed."""
_QUICKEST_S = 0.05
"""Assumed duration of the fastest example until an example has passed."""


class MarkedRanks:
    """Ranks that run a test or a program, and are reused for later tests.

    Args:
        size: Number of ranks, or the name of a test argument that gives the number: an int, or a collection with one
            item per rank.
        backend: A transport's name, or "process" for processes on this host with the fastest transport.
        torch: Whether each rank has torch's default process group.
        options: Options of `unisono.testing.pool`.
    """

    def __init__(self, size: int | str, backend: str = "thread", *, torch: bool = False, **options: Any) -> None:
        self.size = size
        self.backend = backend
        self.torch = torch
        self.options = options
        self.deadlocked: bool = False
        self.quickest_s: float = _QUICKEST_S

    def __repr__(self) -> str:
        return f"{self.backend}-{self.size}"

    @property
    def on_threads(self) -> bool:
        """Whether ranks are threads of this process."""
        from unisono.transports.hierarchical import transport_named

        return self.backend != "process" and transport_named(self.backend).in_process

    def run(self, program: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Return the result of `program(*args, **kwargs)` on each rank."""
        return self.run_test(program, args, kwargs, comm=False)

    def run_test(
        self, test: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, comm: bool
    ) -> list[Any]:
        """Return the result of `test(*args, **kwargs)` on each rank; with `comm`, pass the rank's communicator as well.

        Raises:
            Exception: The error of the first failing rank, with notes that name the rank and the errors of other ranks.
        """
        from unisono.core.work import resolve_timeout
        from unisono.errors import CommTimeoutError
        from unisono.testing.namespaced_ranks import TIMEOUT_S
        from unisono.testing.pools import pool
        from unisono.testing.rank_rules import own_fixtures
        from unisono.testing.thread_warnings import warnings_by_thread

        size = kwargs[self.size] if isinstance(self.size, str) else self.size
        size = size if isinstance(size, int) else len(size)
        options = self.options
        timeout_s = resolve_timeout(options.get("timeout"), TIMEOUT_S)
        if self.deadlocked:
            # After a timeout, Hypothesis tries about 50 smaller examples, most of which also time out: shorten their
            # timeout.
            timeout_s = min(timeout_s, max(_SHRINKING_S, _SLACK * self.quickest_s))
            options = {**options, "timeout": timeout_s}
        backend = _processes() if self.backend == "process" else self.backend
        threads = self.on_threads
        # Patches made by thread ranks affect the whole process, and only pytest can undo them in order.
        own = kwargs.keys() & ({"subtests"} if threads else {"subtests", "monkeypatch"})
        shared = {name: value for name, value in kwargs.items() if name not in own}

        @functools.wraps(test)
        def on_one_rank(one: Communicator) -> Any:
            # Call `own_fixtures` only if needed, because it imports pytest, which may not be installed.
            instead: AbstractContextManager[dict[str, Any]] = own_fixtures(own) if own else nullcontext({})
            with instead as fixtures:
                result = test(*args, **shared, **fixtures, **({"comm": one} if comm else {}))
                if not inspect.iscoroutinefunction(test):
                    return result
                import asyncio

                return asyncio.run(result)

        try:
            ranks = pool(backend, size, **options)
            start_s = time.monotonic()
            with warnings_by_thread if threads else nullcontext():
                if self.torch:
                    from unisono.testing.torch_world import run_with_torch

                    results = run_with_torch(ranks, on_one_rank, timeout_s)
                else:
                    results = ranks.run(on_one_rank)
            self.quickest_s = min(self.quickest_s, time.monotonic() - start_s)
            return results
        except CommTimeoutError:
            self.deadlocked = True
            raise

    def __call__(self, test: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a test: return a function that runs `test` on the ranks.

        The returned function returns one rank's result. If `test` is a coroutine function, so is the returned function,
        so that the test runner handles coroutines in its own way. A keyword argument whose value is this
        `MarkedRanks` is replaced by the argument `comm`, the rank's communicator.
        """

        @functools.wraps(test)
        def on_ranks(*args: Any, **kwargs: Any) -> Any:
            others = {name: value for name, value in kwargs.items() if value is not self}
            results = self.run_test(test, args, others, comm=len(others) < len(kwargs))
            return next((result for result in results if result is not None), None)

        if not inspect.iscoroutinefunction(test):
            return on_ranks

        @functools.wraps(test)
        async def in_loop(*args: Any, **kwargs: Any) -> Any:
            import asyncio

            # Servers started by asynchronous fixtures keep running in this event loop while ranks use them from their
            # own loops.
            return await asyncio.to_thread(on_ranks, *args, **kwargs)

        return in_loop


def _processes() -> str:
    """Return the fastest transport between processes on this host."""
    from unisono.host.native import core_build
    from unisono.host.network import why_no_shm
    from unisono.launcher.api import network_of

    return "shm" if why_no_shm() is None else network_of([core_build()])


def torch_ranks(size: int | str, backend: str = "thread", **options: Any) -> MarkedRanks:
    """Return a decorator that runs a test on ranks, each with torch's default process group.

    Use the decorator with unittest, or below Hypothesis' `given`. With pytest, use the marker `ranks(3, torch=True)`.

    Args:
        size: Number of ranks, or the name of a test argument that gives the number: an int, or a collection with one
            item per rank.
        backend: "thread"; "process" for processes on this host; "sim" for simulated ranks, scheduled by a seed; or
            another transport's name.
        options: Options of `unisono.testing.pool`, such as `timeout` and `limit_s` in seconds, and `seed` with "sim".

    Raises:
        Exception: The decorated test raises the error of the first failing rank, with notes that name the rank and the
            errors of other ranks.

    Cost: a few milliseconds per run on threads or on processes that are already running.

    Example:
        >>> import torch.distributed as dist
        >>> @un.testing.torch_ranks(3)
        ... def test_sum():
        ...     t = torch.ones(2)
        ...     dist.all_reduce(t)
        ...     assert t.tolist() == [dist.get_world_size()] * 2
        >>> test_sum()
    """
    return MarkedRanks(size, backend, torch=True, **options)
