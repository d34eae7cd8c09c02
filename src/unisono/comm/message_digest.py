"""Message digests for `check="full"`: the sender publishes a hash over the control plane for the receiver."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from unisono.comm.engine import Engine
from unisono.core.buffer_guard import digest
from unisono.core.types import Message, Recv
from unisono.errors import CorruptedError

__all__ = ["vouch"]

_DIGEST = struct.Struct("<Q")


def vouch(engine: Engine, messages: Sequence[Message]) -> list[Callable[[], object]]:
    """Publish the hashes of sent tensors; return functions that compare the received ones when all have arrived.

    Cost: one request to the control plane a message sent, two a message received.
    """
    checks: list[Callable[[], object]] = []
    for message in messages:
        rank, peer = engine.group.rank, message.peer
        source, target = (peer, rank) if isinstance(message, Recv) else (rank, peer)
        stream = type(message), source, target, message.tag
        engine.vouched[stream] += 1
        key = f"{engine.group.name}/message {engine.vouched[stream]} of tag {message.tag} from {source} to {target}"
        if isinstance(message, Recv):
            # Mypy cannot type a lambda's default.
            checks.append(lambda message=message, key=key: _compare(engine, message, key))  # type: ignore[misc]
        else:
            engine.control.set(key, _DIGEST.pack(digest(message.tensor)))
    return checks


def _compare(engine: Engine, message: Message, key: str) -> None:
    told = engine.control.get(key, engine.options.timeout_s, engine.group)
    engine.control.delete(key)
    if _DIGEST.unpack(told)[0] != digest(message.tensor):
        raise CorruptedError(
            f"a message from rank {message.peer} (tag {message.tag}) holds other bytes than were sent. Is the "
            "memory or the network between the two ranks faulty?",
            peer=message.peer,
            nbytes=message.tensor.nbytes,
        )
