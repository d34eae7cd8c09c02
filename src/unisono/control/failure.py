"""From the first cause of a failure to the error that a rank raises."""

from __future__ import annotations

from unisono import errors
from unisono.control.base import Cause
from unisono.errors import CommError
from unisono.group import Group

__all__ = ["error_of"]


def error_of(cause: Cause, group: Group | None = None) -> CommError:
    """The error that a member of `group` raises because of `cause`.

    Example:
        >>> print(error_of(Cause("PeerLostError", 1, "rank 1 was lost"), Group.world(0, 4)))
        rank 0 of 4: rank 1 was lost
    """
    kind = getattr(errors, cause.kind, CommError)
    if not (isinstance(kind, type) and issubclass(kind, CommError)):
        kind = CommError
    error = kind(cause.message, peer=cause.rank)
    return error if group is None else error.locate(rank=group.rank, size=group.size)
