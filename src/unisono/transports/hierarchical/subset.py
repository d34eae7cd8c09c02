"""One collective over some ranks of a transport: by its own collective, or by the cheapest schedule."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.collectives.selection import Selection
from unisono.core.call import Call
from unisono.core.group import Group
from unisono.core.transport import Transport
from unisono.core.types import Message, Work
from unisono.core.work import seconds_left

__all__ = ["SubsetCollectives", "SubsetTransport"]


class SubsetTransport(Transport):
    """Some ranks of another transport, renumbered, for schedules. Supports messages only.

    Args:
        base: The other transport.
        ranks: Ranks of `base`, including the caller; their order gives the new numbers.
    """

    def __init__(self, base: Transport, ranks: Sequence[int]) -> None:
        self._base = base
        self._ranks = tuple(ranks)
        self.group = base.group.child("some", self._ranks)
        self.latency_s = base.latency_s
        self.second_per_byte = base.second_per_byte
        self.devices = base.devices
        self.host_staged = base.host_staged

    def post(self, batch: Sequence[Message]) -> Work:
        return self._base.post([_to(message, self._ranks[message.peer]) for message in batch])

    def split(self, group: Group) -> Transport:
        raise NotImplementedError("split the transport that these ranks are part of, not this view of it")

    def close(self) -> None:
        """Do nothing: the owner of the base transport closes it."""

    def abort(self, cause: BaseException) -> None:
        """Do nothing: the owner of the base transport aborts it."""


def _to(message: Message, peer: int) -> Message:
    return type(message)(message.tensor, peer, message.tag)


class SubsetCollectives:
    """Runs calls, one at a time, on the memory that they name.

    Args:
        transport: Its ranks take part.
        chunk_bytes: Largest message of a schedule.
    """

    def __init__(self, transport: Transport, chunk_bytes: int) -> None:
        self.transport = transport
        self._selection = Selection(transport, chunk_bytes)

    def __call__(self, call: Call, deadline: float, *, agrees: bool = False) -> None:
        """Return when this rank's part is done. A reduction in place writes to its inputs, too.

        Args:
            call: The call, without steps.
            deadline: On the clock of `time.monotonic`.
            agrees: Whether the ranks first compare their calls.
        """
        _, steps = self._selection.choose(call)
        chosen = call._replace(steps=steps, timeout=seconds_left(deadline))
        if agrees:
            self.transport.agree(chosen, deadline)
        self.transport.run(chosen).wait(seconds_left(deadline))
