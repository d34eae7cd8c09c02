"""What the agents tell each other: the kind of a message, its number, and what follows."""

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
"""Kind, number of the call, context of autograd (or `NO_CONTEXT`), number of the message within that context."""

NO_CONTEXT = -1

REQUEST = 1
"""A call: its target, arguments and keyword arguments. A reply or an error comes back."""
REPLY = 2
"""The result of the call of this number."""
ERROR = 3
"""What the call raised: see `unisono.rpc.remote_errors`."""
CANCEL = 4
"""Nobody waits for the call of this number any more."""
REMOTE = 5
"""A call whose result stays where it is, under the key that is told first."""
ADD = 6
"""The sender holds one more reference to this key."""
ADD_ACK = 7
"""Whether the owner knows the key of an `ADD`."""
DROP = 8
"""The sender holds one reference less."""
RELEASE = 9
"""A reference that the receiver passed on has been added, or was for the owner itself: it need not be kept."""
EXIT = 10
"""The sender serves no more; the reason follows."""
IDLE = 11
"""The sender wants to shut down and has nothing to do: how many calls it has sent to each rank, and served for each."""
CONFIRM = 12
"""Tell once more whether that is so."""
CLOSE = 13
"""Everybody is done: shut down."""
DISCARD = 14
"""Forget a context of autograd."""
