"""Executor of schedules over a transport: the only module that uses both buffers and messages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter

import torch

from unisono.collectives.algorithms.step import Step
from unisono.collectives.chunk_layout import Layout, Region
from unisono.core.transport import PointToPoint
from unisono.core.types import COLLECTIVE_TAG, Message, Recv, Send, Work
from unisono.errors import CommError

__all__ = ["IN_FLIGHT", "ScratchPool", "execute"]

IN_FLIGHT = 8
"""Maximum number of batches of messages in flight. Bounds the memory that arriving contributions need."""

_Combine = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def execute(
    transport: PointToPoint,
    steps: Iterator[Step],
    layout: Layout,
    combine: _Combine | None = None,
    *,
    segment_bytes: int = 2 << 20,
    timeout: float = 300.0,
    root: int = 0,
    spare: ScratchPool | None = None,
) -> None:
    """Execute a schedule; return when this rank's part is done and its buffers may be reused.

    Long messages are cut into segments. Segment i of all messages of a step is one batch; the next
    step's batch starts as soon as the segments that it sends have arrived (and been reduced), while
    later segments are still in flight. So a ring is pipelined without any code for it in the ring's file.

    Args:
        transport: Transport that posts the messages.
        steps: This rank's steps, of a schedule written for root 0.
        layout: Memory layout of the chunks.
        combine: `combine(low, high, out)`, for schedules that reduce.
        segment_bytes: Largest message.
        timeout: Seconds for the whole schedule.
        root: The real root; peers are renumbered.
        spare: Memory kept from earlier calls.

    Raises:
        CommTimeoutError: Not done in time; names the step and the missing ranks.
        CommError: Any error of the transport.
    """
    run = _Run(transport, combine, time.monotonic() + timeout, spare or ScratchPool())
    size = transport.size
    for number, step in enumerate(steps, 1):
        for sends, recvs in _segments(step, layout, root, size, segment_bytes):
            run.start(number, sends, recvs, step.reduce)
    while run.flight:
        run.settle()


_Routed = tuple[int, Region]
"""A peer, and what travels to it or from it."""


_Segment = tuple[list[_Routed], list[_Routed]]
"""Sends and receives of one batch."""


def _segments(step: Step, layout: Layout, root: int, size: int, segment_bytes: int) -> list[_Segment]:
    """Return segment i of all messages of a step, for each i."""
    found: list[_Segment] = []
    for side, moves in enumerate((step.send, step.recv)):
        for move in moves:
            peer = (move.peer + root) % size
            for number, region in enumerate(layout.regions(move.start, move.stop, segment_bytes)):
                if number == len(found):
                    found.append(([], []))
                found[number][side].append((peer, region))
    return found


@dataclass(slots=True, eq=False)
class _Batch:
    """Messages in flight, and memory for their contributions that are still to be reduced."""

    work: Work
    step: int
    sends: list[_Routed]
    recvs: list[_Routed]
    landed: list[torch.Tensor]


class ScratchPool:
    """Reusable memory for arriving contributions: fresh memory costs a page fault per page.

    Args:
        most_bytes: What is kept, at most.
    """

    def __init__(self, most_bytes: int = 16 << 20) -> None:
        self._most, self._held = most_bytes, 0
        self._free: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Uninitialised memory of a tensor's length, dtype and device."""
        free = self._free.get((like.numel(), like.dtype, like.device))
        if not free:
            # A call in inference mode must not leave memory behind that only inference mode may write to.
            with torch.inference_mode(mode=False):
                return torch.empty_like(like)
        self._held -= like.nbytes
        return free.pop()

    def give(self, tensor: torch.Tensor) -> None:
        """Return a tensor from `take` to the pool."""
        if self._held + tensor.nbytes > self._most:
            self._free.clear()
            self._held = 0
        self._free.setdefault((tensor.numel(), tensor.dtype, tensor.device), []).append(tensor)
        self._held += tensor.nbytes


class _Run:
    def __init__(self, transport: PointToPoint, combine: _Combine | None, deadline: float, spare: ScratchPool) -> None:
        self._transport, self._combine, self._deadline = transport, combine, deadline
        self._rank, self._spare = transport.rank, spare
        self.flight: deque[_Batch] = deque()

    def start(self, step: int, sends: list[_Routed], recvs: list[_Routed], reduce: bool) -> None:
        """Post one batch, after what it depends on has arrived."""
        # What is reduced lands beside the buffer first, so it may arrive while the buffer is still read.
        hazards = [] if reduce else recvs
        while self.flight and (len(self.flight) >= IN_FLIGHT or self._conflicts(sends, hazards)):
            self.settle()
        messages: list[Message] = []
        landed: list[torch.Tensor] = []
        for peer, region in recvs:
            tensor = region.tensor
            if reduce:
                tensor = self._spare.take(tensor)
                landed.append(tensor)
            messages.append(Recv(tensor, peer, COLLECTIVE_TAG))
        for peer, region in sends:
            messages.append(Send(region.tensor, peer, COLLECTIVE_TAG))
        self.flight.append(_Batch(self._transport.post(messages), step, sends, recvs, landed))

    def _conflicts(self, reads: list[_Routed], overwrites: list[_Routed]) -> bool:
        # Plain loops, because this runs for each message: a generator would cost more than the test itself.
        for batch in self.flight:
            if _overlap(reads, batch.recvs) or _overlap(overwrites, batch.recvs) or _overlap(overwrites, batch.sends):
                return True
        return False

    def settle(self) -> None:
        """Wait for the oldest batch and reduce the received data, if possible while its sends are still in flight."""
        batch = self.flight.popleft()
        try:
            if batch.landed and not _overlap(batch.recvs, batch.sends):
                batch.work.wait_received(max(0.0, self._deadline - time.monotonic()))
                self._reduce(batch)
            batch.work.wait(max(0.0, self._deadline - time.monotonic()))
            if batch.landed:
                self._reduce(batch)
        except CommError as error:
            error.message += f" (step {batch.step} of the schedule)"
            raise

    def _reduce(self, batch: _Batch) -> None:
        """Reduce contributions in rank order, including this rank's own; release their memory."""
        found: dict[tuple[int, int, int], list[tuple[int, torch.Tensor]]] = {}
        for (peer, region), contribution in zip(batch.recvs, batch.landed, strict=False):
            found.setdefault(region[:3], [(self._rank, region.tensor)]).append((peer, contribution))
        for contributions in found.values():
            assert self._combine is not None
            own = contributions[0][1]
            (_, total), *others = sorted(contributions, key=itemgetter(0))
            for _, contribution in others:
                # The running total moves into this rank's buffer as soon as that buffer has been reduced.
                out = own if contribution is own else total
                self._combine(total, contribution, out)
                total = out
        while batch.landed:
            self._spare.give(batch.landed.pop())


def _overlap(some: list[_Routed], others: list[_Routed]) -> bool:
    for _, (key, start, stop, _) in some:
        for _, other in others:
            if key == other.key and start < other.stop and other.start < stop:
                return True
    return False
