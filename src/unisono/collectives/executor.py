"""Executor of algorithms over a transport: the only module that uses both buffers and messages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import torch

from unisono.collectives.algorithms import Algorithm
from unisono.collectives.algorithms.semantics import balanced
from unisono.collectives.algorithms.step import Step
from unisono.collectives.chunk_layout import Flat, Layout, PartialSums, Pieces, Region
from unisono.core.call import Call
from unisono.core.collective import FAMILIES
from unisono.core.tensors import combine
from unisono.core.transport import PointToPoint
from unisono.core.types import COLLECTIVE_TAG, Message, Recv, ReduceOp, Send, Work
from unisono.errors import CommError

__all__ = ["IN_FLIGHT", "ScratchPool", "execute", "execute_call"]

IN_FLIGHT = 8
"""Maximum number of batches of messages in flight. Bounds the memory that arriving contributions need."""

_Combine = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def execute_call(
    algorithm: Algorithm, segment_bytes: int, scratch: ScratchPool, transport: PointToPoint, call: Call, deadline: float
) -> None:
    """Return when this rank's part of a call is done.

    Args:
        algorithm: One of the call's collective.
        segment_bytes: Largest message.
        scratch: Memory kept from earlier calls.
        transport: Carries the messages.
        call: A reduction in place writes to its tensors.
        deadline: On the clock of `time.monotonic`.
    """
    rank, size, root = transport.rank, transport.size, call.root or 0
    _copy_own_part(call, rank)
    execute(
        transport,
        algorithm.steps((rank - root) % size, size),
        _layout_of(call, algorithm.chunks(size), rank, size),
        partial(combine, call.op or ReduceOp.SUM),
        segment_bytes=segment_bytes,
        timeout=deadline - time.monotonic(),
        root=root,
        spare=scratch,
    )


def _layout_of(call: Call, chunks: int, rank: int, size: int) -> Layout:
    """Return the layout of an algorithm's chunks in the tensors of a call."""
    family = FAMILIES[call.name]
    root = call.root or 0
    if not family.moves:
        return Flat.even(torch.ones(1, dtype=torch.uint8, device="cpu"), chunks)
    if family.in_place:
        return Flat.even((call.inputs or call.outputs)[0], chunks)
    if family.reduces:
        return PartialSums(call.inputs, rank, call.outputs[0])
    if family.pairwise:
        return Pieces(dict(enumerate((*call.inputs, *call.outputs))), call.inputs[0])
    many, one = (call.outputs, call.inputs) if family.gathers else (call.inputs, call.outputs)
    here = {(r - root) % size: tensor for r, tensor in enumerate(many)} or {(rank - root) % size: one[0]}
    return Pieces(here, one[0], call.lengths[root:] + call.lengths[:root])


def _copy_own_part(call: Call, rank: int) -> None:
    """Copy a rank's part for itself; algorithms assume that this is done."""
    family = FAMILIES[call.name]
    if family.in_place or not (call.inputs and call.outputs) or (family.reduces and len(call.inputs) > 1):
        return
    source = call.inputs[rank if family.scatters else 0]
    target = call.outputs[rank if family.gathers else 0]
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


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
    """Execute an algorithm; return when this rank's part is done and its buffers may be reused.

    Long messages are cut into segments. Segment i of all messages of a step is one batch; the next
    step's batch starts as soon as the segments that it sends have arrived (and been reduced), while
    later segments are still in flight. So a ring is pipelined without any code for it in the ring's file.

    Args:
        transport: Transport that posts the messages.
        steps: This rank's steps, of an algorithm written for root 0.
        layout: Memory layout of the chunks.
        combine: `combine(low, high, out)`, for algorithms that reduce.
        segment_bytes: Largest message.
        timeout: Seconds for all of it.
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


_Routed = tuple[int, list[Region]]
"""A peer, and the regions of a message to it or from it."""


_Segment = tuple[list[_Routed], list[_Routed]]
"""Sends and receives of one batch."""


def _segments(step: Step, layout: Layout, root: int, size: int, segment_bytes: int) -> list[_Segment]:
    """Return segment i of all messages of a step, for each i."""
    found: list[_Segment] = []
    for side, moves in enumerate((step.send, step.recv)):
        for move in moves:
            peer = (move.peer + root) % size
            for number, regions in enumerate(layout.messages(move, segment_bytes, receive=side == 1)):
                if number == len(found):
                    found.append(([], []))
                found[number][side].append((peer, regions))
    return found


@dataclass(slots=True, eq=False)
class _Batch:
    """Messages in flight, and memory beside the buffer that holds what they carry."""

    work: Work
    step: int
    sends: list[_Routed]
    recvs: list[_Routed]
    reduce: bool
    packed: list[torch.Tensor]
    landed: list[torch.Tensor | None]
    """Memory of each receive that does not arrive in its place: contributions, and packed messages."""


class ScratchPool:
    """Reusable memory for arriving contributions: fresh memory costs a page fault per page.

    Args:
        most_bytes: What is kept, at most.
    """

    def __init__(self, most_bytes: int = 16 << 20) -> None:
        self._most, self._held = most_bytes, 0
        self._free: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}

    def take(self, regions: list[Region]) -> torch.Tensor:
        """Uninitialised memory for a message, of its dtype and device."""
        like, numel = regions[0].tensor, sum(region.stop - region.start for region in regions)
        free = self._free.get((numel, like.dtype, like.device))
        if not free:
            # A call in inference mode must not leave memory behind that only inference mode may write to.
            with torch.inference_mode(mode=False):
                return like.new_empty(numel)
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
        landed: list[torch.Tensor | None] = []
        packed: list[torch.Tensor] = []
        for peer, regions in recvs:
            beside = self._spare.take(regions) if reduce or len(regions) > 1 else None
            landed.append(beside)
            messages.append(Recv(regions[0].tensor if beside is None else beside, peer, COLLECTIVE_TAG))
        for peer, regions in sends:
            tensor = regions[0].tensor
            if len(regions) > 1:
                tensor = self._spare.take(regions)
                packed.append(tensor)
                torch.cat([region.tensor for region in regions], out=tensor)
            messages.append(Send(tensor, peer, COLLECTIVE_TAG))
        self.flight.append(_Batch(self._transport.post(messages), step, sends, recvs, reduce, packed, landed))

    def _conflicts(self, reads: list[_Routed], overwrites: list[_Routed]) -> bool:
        # Plain loops, because this runs for each message: a generator would cost more than the test itself.
        for batch in self.flight:
            if _overlap(reads, batch.recvs) or _overlap(overwrites, batch.recvs) or _overlap(overwrites, batch.sends):
                return True
        return False

    def settle(self) -> None:
        """Wait for the oldest batch and store the received data, if possible while its sends are still in flight."""
        batch = self.flight.popleft()
        try:
            early = any(beside is not None for beside in batch.landed) and not _overlap(batch.recvs, batch.sends)
            if early:
                batch.work.wait_received(max(0.0, self._deadline - time.monotonic()))
                self._store(batch)
            batch.work.wait(max(0.0, self._deadline - time.monotonic()))
            if not early:
                self._store(batch)
        except CommError as error:
            error.message += f" (step {batch.step} of the algorithm)"
            raise
        for tensor in batch.packed:
            self._spare.give(tensor)

    def _store(self, batch: _Batch) -> None:
        """Reduce or copy what has arrived beside the buffer, and release that memory."""
        found: dict[tuple[int, int, int], tuple[Region, list[tuple[int, torch.Tensor]]]] = {}
        for (peer, regions), beside in zip(batch.recvs, batch.landed, strict=True):
            if beside is None:
                continue
            parts = beside.split([region.stop - region.start for region in regions])
            for region, part in zip(regions, parts, strict=True):
                if batch.reduce:
                    found.setdefault(region[:3], (region, []))[1].append((peer, part))
                else:
                    region.tensor.copy_(part)
        for region, contributions in found.values():
            self._reduce(region, contributions)
        for beside in batch.landed:
            if beside is not None:
                self._spare.give(beside)

    def _reduce(self, region: Region, contributions: list[tuple[int, torch.Tensor]]) -> None:
        """Reduce contributions and this rank's own, in a balanced tree by rank, into the region."""
        target = region.tensor
        own = target if region.own is None else region.own

        def plus(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
            assert self._combine is not None
            out = target if low is own or high is own or high is target else low
            self._combine(low, high, out)
            return out

        ordered = sorted([(self._rank, own), *contributions], key=itemgetter(0))
        balanced([tensor for _, tensor in ordered], plus)


def _overlap(some: list[_Routed], others: list[_Routed]) -> bool:
    for _, regions in some:
        for key, start, stop, *_ in regions:
            for _, other_regions in others:
                for other in other_regions:
                    if key == other.key and start < other.stop and other.start < stop:
                        return True
    return False
