"""Messages between agents: kind, number, and payload."""

from __future__ import annotations

import struct

__all__ = [
    "ADD",
    "ADD_ACK",
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
]

HEADER = struct.Struct("<BQqQ")
"""Kind, number of the call, autograd context (or `NO_CONTEXT`), number of the message within that context."""

NO_CONTEXT = -1

REQUEST = 1
"""A call: its target, arguments and keyword arguments. Answered by a reply or an error."""
REPLY = 2
"""The result of the call of this number."""
ERROR = 3
"""The error that the call raised: see `unisono.rpc.remote_errors`."""
CANCEL = 4
"""The call of this number is cancelled."""
REMOTE = 5
"""A call that leaves its result on the callee, under the key that is sent first."""
ADD = 6
"""The sender holds one more reference to this key."""
ADD_ACK = 7
"""Reply to an `ADD`: whether the owner knows the key."""
DROP = 8
"""The sender holds one reference less."""
RELEASE = 9
"""A reference that the receiver passed on has been added, or was for the owner itself: it need not be kept."""
EXIT = 10
"""The sender serves no more; the reason follows."""
IDLE = 11
"""The sender wants to shut down and has nothing to do: how many calls it has sent to each rank, and served for each."""
CONFIRM = 12
"""Request to report once more whether that is so."""
CLOSE = 13
"""All ranks are done: shut down."""
DISCARD = 14
"""Forget an autograd context."""
