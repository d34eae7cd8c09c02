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
    """Engine that lends workers. A class of another package needs its one method, and not this base class.

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
        """Return a context of an executor that is given `size` tasks, and runs each in a process of its own.

        All workers are there when the context begins, or the executor starts them together. Tasks that still run when
        it ends are ended, as far as the engine can; what it has started for them ends too. A task whose worker has
        died is not run again. If the engine has an attribute `replaces` that is true, the executor takes further
        tasks instead of such ones, and runs each in a new or an idle process: for `on_failure="replace"`. If it has
        `starts_workers` that is true, the processes run nothing else, and end themselves when the caller is gone. If
        the executor has a method `why_lost`, it is called each second with the future of a task that has ended, until
        that is done, and returns why it never will be, or None.

        Args:
            size: Number of tasks.
            timeout_s: Seconds within which the workers must be there.

        Raises:
            CommTimeoutError, CommError: They are not. The error says how many there are.
            ValueError: Its options do not suit this number of tasks.
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
