"""Accepts a message that is shorter than the receive, without an error."""

from __future__ import annotations

from unisono.core.group import Group
from unisono.transports.thread import InFlightMessage, ThreadTransport

CHECK = "receive_of_wrong_size_is_rejected"
ERROR = "a receive of 3 torch.float32 for 4 of float32 raised: nothing"


class Mutant(ThreadTransport):
    def split(self, group: Group) -> Mutant:
        return Mutant(group, self._queue, self._timeout_s)

    def _deliver(self, message: InFlightMessage) -> None:
        given, taken = message.sent.tensor, message.expected.tensor
        count = min(given.numel(), taken.numel())
        taken[:count] = given[:count]
        message.send.arrived(message.sent)
        message.recv.arrived(message.expected)
