"""Kinds and headers of messages between agents, and the addresses of ranks."""

from __future__ import annotations

import struct
from dataclasses import dataclass

__all__ = [
    "ADD",
    "ADD_ACK",
    "CALL",
    "CANCEL",
    "CLOSE",
    "CONFIRM",
    "DISCARD",
    "DROP",
    "ERROR",
    "EXIT",
    "HEADER",
    "IDLE",
    "NO_CONTEXT",
    "RELEASE",
    "REMOTE",
    "REPLY",
    "REQUEST",
    "WorkerInfo",
]

HEADER = struct.Struct("<BQqQ")
"""Kind, number of the call, autograd context (or `NO_CONTEXT`), number of the message within that context."""

NO_CONTEXT = -1

CALL = struct.Struct("<QqQII")
"""Header of a call, after `HEADER`: number of the object to create (0 if the result is returned); creator (-1 if there
is none) and number of the object whose method is called; length of the function's name in bytes; number of positional
arguments. The name follows, then the positional arguments, then the keyword arguments, if any."""

REQUEST = 1
"""A call, answered by a reply or an error."""
REPLY = 2
"""The result of the call with this number."""
ERROR = 3
"""The error that the call raised: see `unisono.rpc.remote_errors`."""
CANCEL = 4
"""The caller has cancelled the call with this number."""
REMOTE = 5
"""A call that leaves its result on the callee."""
ADD = 6
"""The sender holds one more reference to this key."""
ADD_ACK = 7
"""Reply to an `ADD`: whether the owner knows the key."""
DROP = 8
"""The sender has dropped one reference to this key."""
RELEASE = 9
"""The owner has counted a reference that the receiver passed on, so the receiver may unpin its own."""
EXIT = 10
"""The sender no longer serves calls; the message contains the reason."""
IDLE = 11
"""The sender wants to shut down and is idle; the message has the numbers of calls sent to and served for each rank."""
CONFIRM = 12
"""Request to report `IDLE` again."""
CLOSE = 13
"""All ranks are done: shut down."""
DISCARD = 14
"""Discard an autograd context."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Address of a rank for calls.

    Args:
        name: Name of the rank, as passed to `init`.
        id: Number of the rank.

    Example:
        >>> un.rpc.WorkerInfo("worker1", 1).id
        1
    """

    name: str
    id: int
