"""From the first cause of a failure to the error that a rank raises."""

from __future__ import annotations

from unisono import errors
from unisono.control.base import Cause
from unisono.errors import CommError
from unisono.group import Group

__all__ = ["LEFT", "error_of", "text_of"]

LEFT = "has left (it closed the communicator, or its program has ended)"
"""What becomes of a rank that others wait for in vain, though nothing went wrong there."""

_MOST_SAID = 10_000


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


def text_of(error: BaseException) -> str:
    """An error's text, as it is passed on to others: in bounds, whatever a user's error says of itself.

    Example:
        >>> text_of(KeyError("x"))
        "'x'"
    """
    try:
        text = str(error)
    except Exception as another:
        text = f"(it cannot be put in words: {type(another).__name__})"
    return f"{text[:_MOST_SAID]}... ({len(text)} letters)" if len(text) > _MOST_SAID else text
