"""Torch's numbers for timeouts, and what they mean here."""

from __future__ import annotations

from datetime import timedelta

from unisono.core.types import Timeout

__all__ = ["DEFAULT_NUM_WORKER_THREADS", "DEFAULT_RPC_TIMEOUT_SEC", "UNSET_RPC_TIMEOUT", "seconds"]

DEFAULT_RPC_TIMEOUT_SEC = 60.0
DEFAULT_NUM_WORKER_THREADS = 16
UNSET_RPC_TIMEOUT = -1.0

_FOREVER_S = 3.0e8


def seconds(timeout: Timeout | None) -> float | None:
    """A timeout as unisono means it: torch writes -1 for the default, and 0 for none at all.

    Example:
        >>> seconds(-1.0), seconds(2.5), seconds(0) > 1e8
        (None, 2.5, True)
    """
    given = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if given is None or given < 0:
        return None
    return _FOREVER_S if given == 0 else given
