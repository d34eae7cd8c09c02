"""Copies of values that the native core defines, for use without the core; a test compares them with the originals.

All other numbers and layouts that both languages share are read from the native core.
"""

from enum import IntEnum

__all__ = ["MESSAGE_HEADER", "Status"]


class Status(IntEnum):
    """Status code of a native call."""

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
