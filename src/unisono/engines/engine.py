"""Protocol of engines, which lend workers to ranks for a while."""

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
    """Engine that lends workers. Another package's class needs its one method, but not this base class.

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
        tasks are ended, as far as the engine can, and whatever it started for them ends as well. A task whose worker
        has died is not run again.

        With a true attribute `replaces`, the executor accepts a further task for each lost one, and runs it in a new or
        idle process; `on_failure="replace"` needs this. With a true attribute `starts_workers`, the processes run
        nothing else, and end themselves when the caller is gone. If the executor has a method `why_lost`, it is called
        every second with the pending future of a task that has ended, and returns why the future will never complete,
        or None.

        Args:
            size: Number of tasks.
            timeout_s: Seconds within which all workers must be available.

        Raises:
            CommTimeoutError, CommError: They are not. The error says how many are.
            ValueError: The engine's options do not suit this number of tasks.
            UnavailableError: The engine is not installed.
        """
        ...


def required(module: str, extra: str) -> ModuleType:
    """Import a module of an optional package.

    Raises:
        UnavailableError: It is not installed; the error says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UnavailableError(
            f"engine {extra!r} needs the package {module.partition('.')[0]!r}, which is not installed ({error}): "
            f"{install_command(extra)}"
        ) from error
