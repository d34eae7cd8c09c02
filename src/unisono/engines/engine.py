"""Protocol for engines, which lend workers to ranks for a while."""

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
    """Engine that lends workers. A class from another package needs only this one method, not the base class.

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
        """Return a context with an executor that gets `size` tasks, and runs each in a separate process.

        All workers exist when the context begins, or the executor starts them together. When the context ends, running
        tasks are stopped, as far as the engine can stop them, and so is everything it started for them. A task whose
        worker has died is not run again.

        If the executor has a true attribute `replaces`, it accepts another task for each lost one, and runs it in a new
        or idle process; `on_failure="replace"` needs this. If it has a true attribute `starts_workers`, the processes
        run nothing else, and exit by themselves when the caller is gone. If the executor has a method `why_lost`, it is
        called every second with the pending future of a task that has ended, and returns why the future will never
        complete, or None.

        Args:
            size: Number of tasks.
            timeout_s: Seconds within which all workers must be available.

        Raises:
            CommTimeoutError, CommError: Not all workers are available. The error says how many are.
            ValueError: The engine's options do not fit this number of tasks.
            UnavailableError: The engine is not installed.
        """
        ...


def required(module: str, extra: str) -> ModuleType:
    """Import a module of an optional package.

    Raises:
        UnavailableError: The package is not installed; the error says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UnavailableError(
            f"engine {extra!r} needs the package {module.partition('.')[0]!r}, which is not installed ({error}): "
            f"{install_command(extra)}"
        ) from error
