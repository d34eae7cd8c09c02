"""Replies from the control plane, and their receivers."""

from __future__ import annotations

from unisono.core.failure import Cause

__all__ = ["Outgoing", "Reply", "failed", "pushed"]

Reply = tuple[int, str, object]
"""Number of the request (0: unsolicited), "ok" or "failed", and the value or the cause's three fields."""

Outgoing = list[tuple[int, Reply]]
"""Replies with their receiving clients, in sending order."""


def failed(request: int, cause: Cause) -> Reply:
    """Return the reply to a request that has failed."""
    return request, "failed", (cause.kind, cause.rank, cause.message)


def pushed(name: str, cause: Cause) -> Reply:
    """Return the message that notifies a member of its group's failure."""
    return 0, "failed", (name, cause.kind, cause.rank, cause.message)
