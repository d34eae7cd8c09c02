"""Runs algorithms over a transport. No other module handles both buffers and messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import torch

from unisono.collectives.algorithms import Algorithm
from unisono.collectives.algorithms.algorithm import balanced
from unisono.collectives.algorithms.step import Move, Step, move_of
from unisono.core import clock
from unisono.core.call import Call
from unisono.core.collective import FAMILIES, Collective
from unisono.core.tensors import COMBINE, numels
from unisono.core.types import COLLECTIVE_TAG, Message, PointToPoint, Recv, ReduceOp, Send, Work
from unisono.errors import CommError

__all__ = [
    "IN_FLIGHT",
    "PACKED_BYTES",
    "Flat",
    "Layout",
    "PartialSums",
    "Pieces",
    "Region",
    "Schedule",
    "ScratchPool",
    "encoded",
    "even_edges",
]

PACKED_BYTES = 64 << 10
"""Largest message that is packed from several regions. For longer messages, the copy costs more than it saves."""


class Region(NamedTuple):
    """Memory to send or receive: elements `start` to `stop` of the buffer with number `key`.

    `tensor` is the view of elements `start` to `stop`. For a reduction, `own` is this rank's contribution if it is not
    in `tensor`.
    """

    key: int
    start: int
    stop: int
    tensor: torch.Tensor
    own: torch.Tensor | None = None


def even_edges(numel: int, parts: int) -> list[int]:
    """Return where each of `parts` nearly equal chunks starts, and where the last chunk ends. Longer chunks come first.

    Example:
        >>> even_edges(10, 4)
        [0, 3, 6, 8, 10]
    """
    quotient, rest = divmod(numel, parts)
    start = rest * (quotient + 1)
    longer = range(0, start, quotient + 1)
    others = range(start, numel + 1, quotient) if quotient else [numel] * (parts - rest + 1)
    return [*longer, *others]


class Layout(ABC):
    """Memory layout of a buffer of chunks.

    Sender and receiver may use different layouts, provided that both layouts cut the chunks into equal segments.
    """

    @abstractmethod
    def regions(self, start: int, stop: int, segment_bytes: int) -> list[Region]:
        """Return the non-empty regions of chunks `start` to `stop`, of at most `segment_bytes` each."""

    def targets(self, start: int, stop: int, segment_bytes: int) -> list[Region]:
        """Return the regions where received data for chunks `start` to `stop` goes."""
        return self.regions(start, stop, segment_bytes)

    def messages(self, move: Move, segment_bytes: int, *, receive: bool = False) -> list[list[Region]]:
        """Return the messages of a `Move`, each as its regions: one region, or several short ones packed together."""
        found: list[list[Region]] = []
        packed = 0
        most = min(segment_bytes, PACKED_BYTES)
        cut = self.targets if receive else self.regions
        for start, stop in ((move.start, move.stop), *move.further):
            for region in cut(start, stop, segment_bytes):
                packed += region.tensor.nbytes
                if found and packed <= most:
                    found[-1].append(region)
                else:
                    found.append([region])
                    packed = region.tensor.nbytes
        return found


class Flat(Layout):
    """Chunks that are slices of one tensor, so that a run of chunks is contiguous.

    Args:
        tensor: The tensor, which is one-dimensional and contiguous.
        edges: Start of each chunk, and the end of the last.
        key: Key of the regions: the tensor's index if there are several tensors.
    """

    def __init__(self, tensor: torch.Tensor, edges: Sequence[int], key: int = 0) -> None:
        self._tensor = tensor
        self._edges = edges
        self._key = key

    def regions(self, start: int, stop: int, segment_bytes: int) -> list[Region]:
        tensor = self._tensor
        low = self._edges[start]
        end = self._edges[stop]
        found = []
        step = max(1, segment_bytes // tensor.element_size())
        while low < end:
            high = min(low + step, end)
            found.append(Region(self._key, low, high, tensor[low:high]))
            low = high
        return found

    targets = regions


class Pieces(Layout):
    """Chunks that are separate tensors, each sent separately.

    Args:
        tensors: Tensors by chunk, one-dimensional and contiguous. A chunk that this rank only forwards has no tensor at
            first; one is created on first use, with the dtype of `like`.
        like: One of the call's tensors.
        lengths: Number of elements in each chunk; empty if every chunk has as many as `like`.
    """

    def __init__(
        self, tensors: dict[int, torch.Tensor], like: torch.Tensor | None = None, lengths: Sequence[int] = ()
    ) -> None:
        self._tensors = tensors
        self._like = like
        self._lengths = lengths

    def regions(self, start: int, stop: int, segment_bytes: int) -> list[Region]:
        found = []
        for chunk in range(start, stop):
            if chunk not in self._tensors:
                assert self._like is not None
                numel = self._lengths[chunk] if self._lengths else self._like.numel()
                self._tensors[chunk] = self._like.new_empty(numel)
            tensor = self._tensors[chunk]
            found += Flat(tensor, (0, tensor.numel()), chunk).regions(0, 1, segment_bytes)
        return found


class PartialSums(Pieces):
    """Chunks of a reduce_scatter. A chunk is the caller's read-only input until a partial sum replaces it.

    Args:
        inputs: Inputs by chunk, one-dimensional and contiguous.
        rank: This rank, which is also the number of the chunk whose sum it gets.
        output: Memory for the result.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], rank: int, output: torch.Tensor) -> None:
        super().__init__({rank: output}, output, numels(inputs))
        self._inputs = inputs
        self._received = set[int]()

    def regions(self, start: int, stop: int, segment_bytes: int) -> list[Region]:
        found = []
        for chunk in range(start, stop):
            if chunk in self._received:
                found += super().regions(chunk, chunk + 1, segment_bytes)
            else:
                tensor = self._inputs[chunk]
                found += Flat(tensor, (0, tensor.numel()), chunk).regions(0, 1, segment_bytes)
        return found

    def targets(self, start: int, stop: int, segment_bytes: int) -> list[Region]:
        # Look up this rank's own contributions first: once a chunk is marked as received, `regions` returns the memory
        # of its partial sum instead. A step may receive several contributions to a chunk; then only the chunk's first
        # target has this rank's own contribution, and `_store` uses that target.
        own = self.regions(start, stop, segment_bytes)
        self._received.update(range(start, stop))
        stored = self.regions(start, stop, segment_bytes)
        return [target._replace(own=mine.tensor) for target, mine in zip(stored, own, strict=True)]


IN_FLIGHT = 8
"""Maximum number of message batches in flight, which limits the memory for received contributions."""


class Schedule:
    """An algorithm's steps on one rank, for any number of calls.

    Long messages are cut into segments. Segments with the same index in all messages of a step form a batch. A batch of
    the next step starts as soon as this rank has received (and reduced) the segments that the batch forwards, while
    later segments are still in flight. So a ring, for example, is pipelined although the ring algorithm itself contains
    no pipelining code.

    Args:
        algorithm: The algorithm.
        rank, size: This rank, and the number of ranks.
        root: Root of the calls.
        segment_bytes: Maximum message size.
        scratch: Pool of memory for received data, shared by all calls.

    Attributes:
        chunks: Number of chunks in the algorithm's messages.
    """

    def __init__(
        self, algorithm: Algorithm, rank: int, size: int, root: int, segment_bytes: int, scratch: ScratchPool
    ) -> None:
        self.chunks: int = algorithm.chunks(size)
        self._rank = rank
        self._size = size
        self._root = root
        self._steps = tuple(algorithm.steps((rank - root) % size, size))
        self._segment_bytes = segment_bytes
        self._scratch = scratch

    def numbers(self) -> list[int]:
        """Return the steps in the format of src/native/steps/program.hpp, with ranks renumbered for the calls' root."""
        return encoded(self._steps, [(place + self._root) % self._size for place in range(self._size)])

    def __call__(self, transport: PointToPoint, call: Call, deadline: float) -> None:
        """Run a call; return once this rank's part is done.

        An in-place reduction may overwrite its inputs even on ranks that get no result.

        Raises:
            CommTimeoutError: The call did not finish in time; the message names the step and the missing ranks.
            CommError: Any error from the transport.
        """
        family = FAMILIES[call.name]
        if not family.in_place:
            _copy_own_part(family, call, self._rank)
        if family.in_place and family.moves:
            tensor = (call.inputs or call.outputs)[0]
            layout: Layout = Flat(tensor, even_edges(tensor.numel(), self.chunks))
        else:
            layout = _layout_of(family, call, self.chunks, self._rank, self._size)
        combine = COMBINE[call.op or ReduceOp.SUM]
        run = _Execution(transport, self._rank, combine, deadline, self._scratch)
        for number, step in enumerate(self._steps, 1):
            # Segments with the same index in all messages of this step form a batch.
            segments: list[_Segment] = []
            for side, moves in enumerate((step.send, step.recv)):
                for move in moves:
                    peer = (move.peer + self._root) % self._size
                    for place, regions in enumerate(layout.messages(move, self._segment_bytes, receive=side == 1)):
                        if place == len(segments):
                            segments.append(([], []))
                        segments[place][side].append((peer, regions))
            for sends, recvs in segments:
                run.start(number, sends, recvs, step.reduce)
        while run.flight:
            run.settle()


def encoded(steps: Iterable[Step], ranks: Sequence[int], chunks: Sequence[int] = ()) -> list[int]:
    """Return steps in the format of src/native/steps/program.hpp.

    Args:
        steps: One rank's steps.
        ranks: For each rank in the algorithm's numbering, its rank in the group.
        chunks: For each chunk in the algorithm's numbering, its number in the call; empty if they are the same.
    """
    found: list[int] = []
    for step in steps:
        found += (int(step.reduce), len(step.send), len(step.recv))
        for move in (*step.send, *step.recv):
            runs = move_of(move.peer, (chunks[chunk] for chunk in move.chunks)).runs if chunks else move.runs
            found += (ranks[move.peer], len(runs))
            for run in runs:
                found += run
    return found


def _layout_of(family: Collective, call: Call, chunks: int, rank: int, size: int) -> Layout:
    """Return where an algorithm's chunks are in the tensors of a call."""
    root = call.root or 0
    if not family.moves:
        return Flat(torch.ones(1, dtype=torch.uint8, device="cpu"), even_edges(1, chunks))
    if family.reduces:
        return PartialSums(call.inputs, rank, call.outputs[0])
    if family.pairwise:
        return Pieces(dict(enumerate((*call.inputs, *call.outputs))), call.inputs[0])
    many, one = (call.outputs, call.inputs) if family.gathers else (call.inputs, call.outputs)
    here = {(r - root) % size: tensor for r, tensor in enumerate(many)} or {(rank - root) % size: one[0]}
    return Pieces(here, one[0], call.lengths[root:] + call.lengths[:root])


def _copy_own_part(family: Collective, call: Call, rank: int) -> None:
    """Copy a rank's own part from its input to its output, because no algorithm does so."""
    if not (call.inputs and call.outputs) or (family.reduces and len(call.inputs) > 1):
        return
    source = call.inputs[rank if family.scatters else 0]
    target = call.outputs[rank if family.gathers else 0]
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


_Routed = tuple[int, list[Region]]
"""A peer, and the regions of a message to or from it."""


_Segment = tuple[list[_Routed], list[_Routed]]
"""Sends and receives of one batch."""


@dataclass(slots=True, eq=False)
class _InFlight:
    """A batch of messages in flight, and separate memory for data that is not received in place."""

    work: Work
    step: int
    sends: list[_Routed]
    recvs: list[_Routed]
    reduce: bool
    packed: list[torch.Tensor]
    landed: list[torch.Tensor | None]
    """Separate memory of each receive, for contributions and packed messages; None if data is received in place."""
    aside: bool
    """Whether any receive uses separate memory."""


class ScratchPool:
    """Pool that reuses memory for received data, because newly allocated memory costs a page fault per page.

    Args:
        most_bytes: Maximum amount of memory to keep.
    """

    def __init__(self, most_bytes: int = 16 << 20) -> None:
        self._most = most_bytes
        self._held = 0
        self._free: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}

    def take(self, regions: list[Region]) -> torch.Tensor:
        """Return uninitialised memory for a message with these regions."""
        like = regions[0].tensor
        numel = 0
        for region in regions:
            numel += region.stop - region.start
        free = self._free.get((numel, like.dtype, like.device))
        if not free:
            # Allocate outside inference mode: later calls reuse the memory, and could not write to an inference tensor.
            with torch.inference_mode(mode=False):
                return like.new_empty(numel)
        self._held -= like.nbytes
        return free.pop()

    def give(self, tensor: torch.Tensor) -> None:
        """Give a tensor from `take` back to the pool."""
        if self._held + tensor.nbytes > self._most:
            self._free.clear()
            self._held = 0
        self._free.setdefault((tensor.numel(), tensor.dtype, tensor.device), []).append(tensor)
        self._held += tensor.nbytes


class _Execution:
    """One call in progress."""

    def __init__(
        self,
        transport: PointToPoint,
        rank: int,
        combine: Callable[..., object],
        deadline: float,
        spare: ScratchPool,
    ) -> None:
        self._transport = transport
        self._combine = combine
        self._deadline = deadline
        self._rank = rank
        self._spare = spare
        self.flight: deque[_InFlight] = deque()

    def start(self, step: int, sends: list[_Routed], recvs: list[_Routed], reduce: bool) -> None:
        """Post a batch, after waiting for the earlier batches that it depends on."""
        # Contributions to a reduction are received into separate memory, so there is no need to wait for earlier sends
        # that still read the same chunks.
        hazards = [] if reduce else recvs
        while self.flight and (len(self.flight) >= IN_FLIGHT or self._conflicts(sends, hazards)):
            self.settle()
        messages: list[Message] = []
        landed: list[torch.Tensor | None] = []
        packed: list[torch.Tensor] = []
        aside = False
        for peer, regions in recvs:
            beside = None
            if reduce or len(regions) > 1:
                beside = self._spare.take(regions)
                aside = True
            landed.append(beside)
            messages.append(Recv(regions[0].tensor if beside is None else beside, peer, COLLECTIVE_TAG))
        for peer, regions in sends:
            tensor = regions[0].tensor
            if len(regions) > 1:
                tensor = self._spare.take(regions)
                packed.append(tensor)
                torch.cat([region.tensor for region in regions], out=tensor)
            messages.append(Send(tensor, peer, COLLECTIVE_TAG))
        work = self._transport.post(messages)
        self.flight.append(_InFlight(work, step, sends, recvs, reduce, packed, landed, aside))

    def _conflicts(self, reads: list[_Routed], overwrites: list[_Routed]) -> bool:
        # Use plain loops: this runs for each batch, and a generator would cost more than the comparisons.
        for batch in self.flight:
            if _overlap(reads, batch.recvs) or _overlap(overwrites, batch.recvs) or _overlap(overwrites, batch.sends):
                return True
        return False

    def settle(self) -> None:
        """Wait for the oldest batch; if possible, store its received data before its sends have completed."""
        batch = self.flight.popleft()
        try:
            early = batch.aside and not _overlap(batch.recvs, batch.sends)
            if early:
                batch.work.wait_received(max(0.0, self._deadline - clock.now()))
                self._store(batch)
            batch.work.wait(max(0.0, self._deadline - clock.now()))
            if not early:
                self._store(batch)
        except CommError as error:
            error.add_note(f"in step {batch.step} of the algorithm")
            raise
        for tensor in batch.packed:
            self._spare.give(tensor)

    def _store(self, batch: _InFlight) -> None:
        """Reduce or copy received data from separate memory into the buffer, and release that memory."""
        found: dict[tuple[int, int, int], tuple[Region, list[tuple[int, torch.Tensor]]]] = {}
        for (peer, regions), beside in zip(batch.recvs, batch.landed, strict=True):
            if beside is None:
                continue
            start = 0
            for region in regions:
                stop = start + region.stop - region.start
                part = beside[start:stop]
                start = stop
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
        """Reduce received contributions and this rank's own into a region, in a balanced tree in rank order."""
        target = region.tensor
        own = target if region.own is None else region.own

        def plus(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
            out = target if low is own or high is own or high is target else low
            self._combine(low, high, out=out)
            return out

        ordered = sorted([(self._rank, own), *contributions], key=itemgetter(0))
        balanced(list(map(itemgetter(1), ordered)), plus)


def _overlap(some: list[_Routed], others: list[_Routed]) -> bool:
    for _, regions in some:
        for key, start, stop, *_ in regions:
            for _, other_regions in others:
                for other in other_regions:
                    if key == other.key and start < other.stop and other.start < stop:
                        return True
    return False
