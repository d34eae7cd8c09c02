"""Torch's numbers for timeouts, and what they mean here."""

from __future__ import annotations

__all__ = ["DEFAULT_NUM_WORKER_THREADS", "DEFAULT_RPC_TIMEOUT_SEC", "UNSET_RPC_TIMEOUT", "seconds"]

DEFAULT_RPC_TIMEOUT_SEC = 60.0
DEFAULT_NUM_WORKER_THREADS = 16
UNSET_RPC_TIMEOUT = -1.0

_FOREVER_S = 3.0e8


def seconds(timeout: float | None) -> float | None:
    """A timeout as unisono means it: torch writes -1 for the default, and 0 for none at all.

    Example:
        >>> seconds(-1.0), seconds(2.5), seconds(0) > 1e8
        (None, 2.5, True)
    """
    if timeout is None or timeout < 0:
        return None
    return _FOREVER_S if timeout == 0 else timeout
