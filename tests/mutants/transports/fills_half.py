"""Takes a message that is shorter than the receive, and says nothing of it."""

from __future__ import annotations

from unisono.group import Group
from unisono.transports.thread import ThreadTransport
from unisono.types import Message, Send
from unisono.work import Countdown

LAW = "a_receive_that_does_not_fit_is_refused"
COMPLAINT = "a receive of 3 torch.float32 for 4 of float32 said: nothing"


class Mutant(ThreadTransport):
    def split(self, group: Group) -> Mutant:
        return Mutant(group, self._mail, self._timeout_s)

    def _deliver(self, mine: Message, my_work: Countdown, other: Message, other_work: Countdown) -> None:
        send, recv = (mine, other) if isinstance(mine, Send) else (other, mine)
        count = min(send.tensor.numel(), recv.tensor.numel())
        recv.tensor[:count] = send.tensor[:count]
        my_work.arrived(mine)
        other_work.arrived(other)
