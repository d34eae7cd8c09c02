"""Run a schedule over a transport: the only place that touches both buffers and messages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

import torch

from unisono.errors import CommError
from unisono.layout import Layout, Region
from unisono.schedules.step import Move, Step
from unisono.transport import PointToPoint
from unisono.types import COLLECTIVE_TAG, Message, Recv, Send, Work

__all__ = ["IN_FLIGHT", "Spare", "execute"]

IN_FLIGHT = 8
"""Batches of messages under way at once. Bounds the memory that arriving contributions need."""

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
    spare: Spare | None = None,
) -> None:
    """Do what a schedule says; return when this rank's part is done and its buffers may be reused.

    Long messages are cut into segments. Segment i of all messages of a step is one batch; the next
    step's batch starts as soon as the segments that it sends have arrived (and been reduced), while
    later segments are still under way. So a ring streams, with no word about it in the ring's file.

    Args:
        transport: Where `post` is.
        steps: This rank's steps, of a schedule written for root 0.
        layout: Where the chunks are.
        combine: `combine(low, high, out)`, for schedules that reduce.
        segment_bytes: Largest message.
        timeout: Seconds for the whole schedule.
        root: The real root; peers are renumbered.
        spare: Memory kept from earlier calls.

    Raises:
        CommTimeoutError: Not done in time; says in which step, and who is missing.
        CommError: Whatever the transport met.
    """
    run = _Run(transport, combine, time.monotonic() + timeout, spare or Spare())
    for number, step in enumerate(steps, 1):
        run.step = number
        sends = [_route(transport, layout, move, root, segment_bytes) for move in step.send]
        recvs = [_route(transport, layout, move, root, segment_bytes) for move in step.recv]
        for pieces in zip_longest(*sends, *recvs):
            out = [p for p in pieces[: len(sends)] if p is not None]
            into = [p for p in pieces[len(sends) :] if p is not None]
            run.start(out, into, step.reduce)
    run.finish()


_Routed = tuple[int, Region]


def _route(transport: PointToPoint, layout: Layout, move: Move, root: int, segment_bytes: int) -> list[_Routed]:
    peer = (move.peer + root) % transport.size
    return [(peer, region) for region in layout.regions(move.start, move.stop, segment_bytes)]


@dataclass(slots=True, eq=False)
class _Batch:
    """Messages under way, what they read and will write, and the contributions still to be reduced."""

    work: Work
    step: int
    reads: list[Region]
    writes: list[Region]
    landed: list[tuple[int, Region, torch.Tensor]]


class Spare:
    """Memory for arriving contributions, kept for the next ones: fresh memory costs a fault a page.

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
        """Take back what `take` gave."""
        if self._held + tensor.nbytes > self._most:
            self._free.clear()
            self._held = 0
        self._free.setdefault((tensor.numel(), tensor.dtype, tensor.device), []).append(tensor)
        self._held += tensor.nbytes


class _Run:
    def __init__(self, transport: PointToPoint, combine: _Combine | None, deadline: float, spare: Spare) -> None:
        self._transport, self._combine, self._deadline = transport, combine, deadline
        self._flight: deque[_Batch] = deque()
        self._spare = spare
        self.step = 0

    def start(self, out: list[_Routed], into: list[_Routed], reduce: bool) -> None:
        """Post one batch, after what it depends on has arrived."""
        reads = [region for _, region in out]
        # What is reduced lands beside the buffer first, so it may arrive while the buffer is still read.
        hazards = [] if reduce else [region for _, region in into]
        while self._flight and (len(self._flight) >= IN_FLIGHT or self._conflicts(reads, hazards)):
            self._settle()
        landed = [(peer, region, self._spare.take(region.tensor)) for peer, region in into] if reduce else []
        messages: list[Message] = []
        if reduce:
            messages += [Recv(scratch, peer, COLLECTIVE_TAG) for peer, _, scratch in landed]
        else:
            messages += [Recv(region.tensor, peer, COLLECTIVE_TAG) for peer, region in into]
        messages += [Send(region.tensor, peer, COLLECTIVE_TAG) for peer, region in out]
        work = self._transport.post(messages)
        self._flight.append(_Batch(work, self.step, reads, [region for _, region in into], landed))

    def finish(self) -> None:
        while self._flight:
            self._settle()

    def _conflicts(self, reads: list[Region], overwrites: list[Region]) -> bool:
        return any(
            _overlap(reads, batch.writes) or _overlap(overwrites, batch.writes) or _overlap(overwrites, batch.reads)
            for batch in self._flight
        )

    def _settle(self) -> None:
        """Wait for the oldest batch and reduce what it brought; if possible, while the rest of it is still sent."""
        batch = self._flight.popleft()
        try:
            if batch.landed and not _overlap(batch.writes, batch.reads):
                batch.work.wait_received(max(0.0, self._deadline - time.monotonic()))
                self._take_in(batch)
                batch.work.wait(max(0.0, self._deadline - time.monotonic()))
            else:
                batch.work.wait(max(0.0, self._deadline - time.monotonic()))
                self._take_in(batch)
        except CommError as error:
            error.message += f" (step {batch.step} of the schedule)"
            raise

    def _take_in(self, batch: _Batch) -> None:
        for region, contributions in _by_region(batch.landed):
            self._reduce(region, contributions)
        for _, _, scratch in batch.landed:
            self._spare.give(scratch)

    def _reduce(self, region: Region, contributions: list[tuple[int, torch.Tensor]]) -> None:
        """Put contributions together in the order of ranks, this rank's own among them."""
        assert self._combine is not None
        own = region.tensor
        ordered = sorted([*contributions, (self._transport.rank, own)], key=lambda item: item[0])
        total = ordered[0][1]
        for _, contribution in ordered[1:]:
            # The running total moves into the own buffer as soon as that has been taken in.
            out = own if contribution is own else total
            self._combine(total, contribution, out)
            total = out


def _overlap(some: list[Region], others: list[Region]) -> bool:
    # Loops, as this is asked for each message: a generator would cost more than the answer.
    for one in some:
        for other in others:
            if one.overlaps(other):
                return True
    return False


def _by_region(
    landed: list[tuple[int, Region, torch.Tensor]],
) -> list[tuple[Region, list[tuple[int, torch.Tensor]]]]:
    """Contributions gathered by the part of the buffer that they belong to."""
    found: dict[tuple[int, int, int], tuple[Region, list[tuple[int, torch.Tensor]]]] = {}
    for peer, region, scratch in landed:
        found.setdefault((region.key, region.start, region.stop), (region, []))[1].append((peer, scratch))
    return list(found.values())
