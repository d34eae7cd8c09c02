"""Protocol for engines, which provide worker processes for ranks."""

from __future__ import annotations

import importlib
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Protocol, runtime_checkable

from unisono.errors import UnavailableError
from unisono.host.distribution import install_command

__all__ = ["Engine", "required"]


@runtime_checkable
class Engine(Protocol):
    """Engine that provides workers. A class from another package only has to define `workers`.

    Example:
        >>> from concurrent.futures import ProcessPoolExecutor
        >>> from contextlib import contextmanager
        >>> class Pool:
        ...     @contextmanager
        ...     def workers(self, size, timeout_s):
        ...         with ProcessPoolExecutor(size) as pool:
        ...             yield pool
        >>> isinstance(Pool(), un.engines.Engine)
        True
    """

    def workers(self, size: int, timeout_s: float) -> AbstractContextManager[Executor]:
        """Return a context with an executor that receives `size` tasks and runs each in a separate process.

        Either all workers exist when the context is entered, or the executor starts them together. On exit from the
        context, running tasks are stopped if the engine can stop them, and everything that the engine started for them
        is shut down. If a task's worker dies, the task is not run again.

        Executors may have three optional attributes. If `replaces` is true, the executor accepts another task for each
        lost task, and runs it in a new or idle process; `on_failure="replace"` needs this. If `starts_workers` is true,
        the processes run nothing but the tasks, and exit by themselves when the caller has exited. If a task has ended
        but its future is still pending, the method `why_lost` is called with the future every second, and returns the
        reason why the future will never complete, or None.

        Args:
            size: Number of tasks, one per rank.
            timeout_s: Seconds within which all workers must be available.

        Raises:
            CommTimeoutError, CommError: Not all workers are available; the error states how many are.
            ValueError: The engine's options do not fit this number of tasks.
            UnavailableError: The engine is not installed.
        """
        ...


def required(module: str, extra: str) -> ModuleType:
    """Import and return a module of an optional package.

    Raises:
        UnavailableError: The package is not installed. The error explains how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UnavailableError(
            f"engine {extra!r} needs the package {module.partition('.')[0]!r}, which is not installed ({error}): "
            f"{install_command(extra)}"
        ) from error
