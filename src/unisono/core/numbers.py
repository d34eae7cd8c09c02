"""What the native core has too, and works without it: a test compares these with the core's own.

All other numbers and layouts that both languages know are read from the core.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["MESSAGE_HEADER", "Status"]


class Status(IntEnum):
    """Status of a native call."""

    OK = 0
    MISMATCH = 1
    TIMEOUT = 2
    PEER_LEFT = 3
    ABORTED = 4
    INTERRUPTED = 5
    UNSUPPORTED = 6
    PEER_LOST = 7


MESSAGE_HEADER = "<qqq"
"""Format of a message's header: tag, number of elements, and code of the dtype."""
