"""A program on several ranks, for a test: with a short timeout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.launcher.api import launch

__all__ = ["TIMEOUT_S", "run_ranks"]

TIMEOUT_S = 10.0
"""Seconds that one operation of a test may take: a test that hangs should say so soon."""


def run_ranks(fn: Callable[..., Any], size: int, backend: str = "thread", *args: Any, **options: Any) -> list[Any]:
    """Each rank's `fn(comm, *args)`, on `size` ranks that live as long as the call.

    Args:
        fn: The program of every rank.
        size: How many ranks.
        backend: A transport's name; "thread" needs no processes.
        args: Passed on.
        options: Of `unisono.launch`; `timeout` is 10 s unless given.

    Raises:
        Exception: What the first failing rank raised; a note says which rank that was.

    Example:
        >>> run_ranks(lambda comm, x: comm.rank + x, 3, "thread", 10)
        [10, 11, 12]
    """
    return launch(fn, size, backend, args, **{"timeout": TIMEOUT_S, **options})
