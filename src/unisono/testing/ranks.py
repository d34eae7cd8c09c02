"""Run a test's program on several ranks, with a short timeout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.launcher.api import launch

__all__ = ["TIMEOUT_S", "run_ranks"]

TIMEOUT_S = 10.0
"""Seconds that one operation of a test may take: a hanging test should fail soon."""


def run_ranks(fn: Callable[..., Any], size: int, backend: str = "thread", *args: Any, **options: Any) -> list[Any]:
    """Return each rank's `fn(comm, *args)`, on `size` ranks that live as long as the call.

    Args:
        fn: The program of every rank.
        size: Number of ranks.
        backend: A transport's name; "thread" needs no processes.
        args: Passed to the program.
        options: Options of `unisono.launch`; `timeout` defaults to 10 s.

    Raises:
        Exception: The error of the first failing rank; a note names the rank.

    Example:
        >>> run_ranks(lambda comm, x: comm.rank + x, 3, "thread", 10)
        [10, 11, 12]
    """
    return launch(fn, size, backend, args, **{"timeout": TIMEOUT_S, **options})
