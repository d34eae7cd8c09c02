"""Takes a message that is shorter than the receive, and says nothing of it."""

from __future__ import annotations

from unisono.core.group import Group
from unisono.transports.thread import InFlightMessage, ThreadTransport

LAW = "a_receive_that_does_not_fit_is_refused"
COMPLAINT = "a receive of 3 torch.float32 for 4 of float32 said: nothing"


class Mutant(ThreadTransport):
    def split(self, group: Group) -> Mutant:
        return Mutant(group, self._mail, self._timeout_s)

    def _deliver(self, letter: InFlightMessage) -> None:
        given, taken = letter.sent.tensor, letter.expected.tensor
        count = min(given.numel(), taken.numel())
        taken[:count] = given[:count]
        letter.send.arrived(letter.sent)
        letter.recv.arrived(letter.expected)
