"""Shared memory with and without the native core."""

from __future__ import annotations

from unittest.mock import patch

import unisono as un
from unisono.transports.shm import transport

__all__ = ["without_core"]


def without_core(comm: un.Communicator) -> un.Communicator:
    """Return another communicator of the same ranks that takes the general path. Collective."""
    with patch.object(transport, "native", lambda: None):
        return comm.dup()
