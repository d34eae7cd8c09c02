"""Torch's special timeout values, and error classes that match both torch's and unisono's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from unisono.core.types import Timeout
from unisono.rpc.remote_errors import RemoteError

__all__ = [
    "DEFAULT_NUM_WORKER_THREADS",
    "DEFAULT_RPC_TIMEOUT_SEC",
    "UNSET_RPC_TIMEOUT",
    "ArgumentError",
    "as_in_torch",
    "as_runtime_error",
    "seconds",
]

DEFAULT_RPC_TIMEOUT_SEC = 60.0
DEFAULT_NUM_WORKER_THREADS = 16
UNSET_RPC_TIMEOUT = -1.0

_FOREVER_S = 3.0e8


def seconds(timeout: Timeout | None) -> float | None:
    """Convert torch's timeout to unisono's: in torch, -1 means the default and 0 means no limit.

    Example:
        >>> seconds(-1.0), seconds(2.5), seconds(0) > 1e8
        (None, 2.5, True)
    """
    given = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if given is None or given < 0:
        return None
    return _FOREVER_S if given == 0 else given


class ArgumentError(RuntimeError, ValueError):
    """Invalid argument that torch rejects with a RuntimeError and unisono with a ValueError."""


@contextmanager
def as_in_torch() -> Iterator[None]:
    """Convert a `ValueError` to an `ArgumentError`, unless a function on another rank raised it."""
    try:
        yield
    except (RemoteError, ArgumentError):
        raise
    except ValueError as error:
        raise ArgumentError(str(error)) from error


@contextmanager
def as_runtime_error() -> Iterator[None]:
    """Convert every exception to a RuntimeError, as torch's distributed backward pass does."""
    try:
        yield
    except RuntimeError:
        raise
    except Exception as error:
        raise RuntimeError(str(error)) from error
