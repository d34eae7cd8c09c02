"""Holds every second message back until the next one of its tag has been sent."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.transport import Transport
from unisono.core.types import Message, Send, Work
from unisono.core.work import Completion
from unisono.wrappers.base import Wrapper

CHECK = "messages_of_one_tag_arrive_in_order"
ERROR = r"arrived in the order \[1\.0, 0\.0, 3\.0, 2\.0"


class Mutant(Wrapper):
    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self._held: dict[tuple[int, int], tuple[Send, Completion]] = {}

    def wrap_child(self, inner: Transport) -> Mutant:
        return Mutant(inner)

    def post(self, batch: Sequence[Message]) -> Work:
        message = batch[0]
        if len(batch) > 1 or not isinstance(message, Send) or message.tag < 0:
            return self.inner.post(batch)
        held = self._held.pop((message.peer, message.tag), None)
        if held is None:
            work = Completion(10.0)
            self._held[message.peer, message.tag] = message, work
            return work
        work_now = self.inner.post([message])
        earlier, earlier_work = held
        self.inner.post([earlier]).get_future().add_done_callback(lambda _: earlier_work.complete())
        return work_now
