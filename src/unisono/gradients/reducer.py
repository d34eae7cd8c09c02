"""When buckets are reduced, in which order, and how: plainly, or by a codec that sends less."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from unisono.communicator import Communicator
from unisono.core.reduce_op import HALVES
from unisono.core.types import Work
from unisono.errors import AbortedError, CommError
from unisono.gradients.backward_pass import SavedGradients
from unisono.gradients.bucket import Bucket
from unisono.gradients.bucket_plan import Named, plan_buckets
from unisono.gradients.weights import Weights

if TYPE_CHECKING:
    from unisono.compression.codec import Codec

__all__ = ["Reducer", "codec_for"]


def codec_for(compression: str | Codec | Callable[[], Codec] | None) -> Codec | None:
    """What users say for a codec, made into one."""
    if compression is None:
        return None
    from unisono import compression as codecs

    return codecs.resolve(compression)


class Reducer:
    """Reduces each bucket as soon as it and all before it are full, so the order is the same on all ranks.

    The last one waits for the end of the pass: by then its rank knows what it has to tell the others. Where the calling
    thread would have to reduce them, all do, and the sum is divided, which is more exact and touches less memory. Where
    the backend goes on by itself, contributions are divided on their way into the bucket.

    Args:
        named: All parameters, with their names.
        comm: Used for nothing else at the same time.
        codec: Spawned for each bucket of real numbers; None reduces the gradients as they are.
        sizes: Most bytes of a bucket, and of the first one if that is another number.
        weights: Asked before the first bucket of a step what to multiply this rank's gradients by.
        saved: What p.grad held before the pass: it is added to what came, and removed there.
        reconnect: Returns another communicator where a failed pass has aborted the old one. Collective.

    Attributes:
        background: Whether a bucket travels while others fill.
        buckets: In their order.
        where: For each parameter that has a bucket, which one, and its place there.
        asked: Whether any rank said in this step that it has something to ask.
        uneven: Whether some rank lacked a gradient in this step.
    """

    def __init__(
        self,
        named: Named,
        comm: Communicator,
        codec: Codec | None,
        sizes: tuple[int, int | None],
        weights: Weights,
        saved: SavedGradients,
        reconnect: Callable[[], Communicator],
    ) -> None:
        self._names, self._parameters = [name for name, _ in named], [p for _, p in named]
        self._comm, self._codec = comm, codec
        self._weights, self._saved, self._reconnect = weights, saved, reconnect
        self._cap, self._first = sizes
        self.background = comm.overlaps and codec is None
        self.buckets: list[Bucket] = []
        self.where: dict[int, tuple[Bucket, int]] = {}
        self._codecs: dict[tuple[int, ...], Codec] = {}
        self._factor: float | None = None
        self._repeats = False
        self._next = 0
        self._halted = self._complete = self.asked = self.uneven = False

    # -- buckets --------------------------------------------------------------------------------
    def add(self, order: Sequence[int]) -> None:
        """Make buckets for these parameters, after those that there are. Collective."""
        for indices in plan_buckets(self._parameters, order, self._cap, None if self.buckets else self._first):
            members = [self._parameters[i] for i in indices]
            first, last = self._names[indices[0]], self._names[indices[-1]]
            name = repr(first) if first == last else f"{first!r} to {last!r}"
            bucket = Bucket(indices, members, self._memory, self._scale(members[0].dtype), name)
            self.buckets.append(bucket)
            self.where.update((index, (bucket, slot)) for slot, index in enumerate(indices))

    def rearrange(self, seen: Sequence[int]) -> None:
        """Recreate the buckets, in the order in which gradients were first seen to come. Collective."""
        known = list(self.where)
        first = [i for i in seen if i in self.where]
        order = [*first, *(i for i in known if i not in set(first))]
        if order != known or not seen:
            self.clear()
            self.add(order)

    def clear(self) -> None:
        """Forget all buckets."""
        self.buckets.clear()
        self.where.clear()

    def _scale(self, dtype: torch.dtype) -> float:
        """What each contribution is multiplied by on its way into a bucket of this dtype."""
        # An average of halves divides them first, to which a power of two is exact: then it is cheaper here.
        first = dtype in HALVES and self._codec is None and self._comm.size.bit_count() == 1
        return 1 / self._comm.size if self.background or first else 1.0

    def _memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """What the backend reduces best. Collective."""
        if device.type == "cpu":
            # Where a failed pass has aborted it, plain memory serves until another one takes its place.
            with suppress(AbortedError):
                return self._comm.empty(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=device)

    def holding(self, grad: torch.Tensor) -> Bucket | None:
        """The bucket in whose memory a gradient lies, if any."""
        return next((bucket for bucket in self.buckets if bucket.holds(grad)), None)

    def codec_of(self, bucket: Bucket) -> Codec | None:
        """The bucket's own codec, if it has one."""
        if self._codec is None or not bucket.flat.is_floating_point():
            return None
        found = self._codecs.get(bucket.indices)
        if found is None:
            found = self._codecs[bucket.indices] = self._codec.clone()
        return found

    # -- a pass ---------------------------------------------------------------------------------
    @property
    def first_work(self) -> Work | None:
        """The reduction of the first bucket, if it is under way."""
        return self.buckets[0].work if self.buckets else None

    def advance(self) -> None:
        """Start the buckets whose turn it is, the full ones but for the last; none where it would hold up the pass."""
        if not self.background or self._halted:
            return
        with torch.no_grad():
            try:
                while self._next < len(self.buckets) - 1 and 0 not in self.buckets[self._next].inside:
                    self._start()
            except AbortedError:
                # The end of the pass sees to it, unless this rank's pass fails by itself before.
                self._halted = True

    def finish(self, came: Set[int], first: int = 0, *, asks: bool = False) -> None:
        """Start what is left and wait for all; the means are given out.

        Where another rank's pass has failed, and nothing of this one's was used yet, it is done again with that rank's
        next pass.

        Args:
            came: Indices of parameters whose gradients have come and may be in no bucket yet.
            first: The first bucket to wait for.
            asks: Whether this rank has something to ask of all ranks.
        """
        while True:
            try:
                self._reduce_all(came, first, asks)
                break
            except AbortedError as aborted:
                if first or not all(bucket.can_rewind() for bucket in self.buckets):
                    raise
                self._rewind(aborted)
        self._complete, self._repeats = True, False
        if self.buckets:
            late, self.asked = self.buckets[-1].asked
            if late:
                self._take_late()
        for bucket in self.buckets[first:]:
            bucket.assign_grads(bucket.found)
            self.uneven = self.uneven or bucket.found is not bucket.complete

    def _reduce_all(self, came: Set[int], first: int, asks: bool) -> None:
        late = any(map(Bucket.is_late, self.buckets[: self._next]))
        while self._next < len(self.buckets):
            self._start(came, (late, asks))
        if self._factor is None:
            self._factor = self._weights.agree()
        for bucket in self.buckets[first:]:
            if bucket.work is not None:
                self._wait(bucket)

    def _start(self, came: Set[int] = frozenset(), asks: Sequence[bool] = ()) -> None:
        """Begin the reduction of the next bucket; its memory belongs to that until `_wait`."""
        bucket, last = self.buckets[self._next], self._next == len(self.buckets) - 1
        if (failure := self._comm.exception()) is not None:
            # Another rank's pass has failed.
            raise failure
        if self._factor is None:
            self._factor = self._weights.agree() if self._weights.uneven else self._weights.factor
        bucket.finalize(came, self._saved.aside, self._factor, self._weights.here, asks if last else (), self._repeats)
        # Before the reduction, which may end in an error on this rank alone.
        self._next += 1
        self._reduce(bucket)

    def _reduce(self, bucket: Bucket) -> None:
        codec = None if self._codec is None else self.codec_of(bucket)
        try:
            if self.background:
                bucket.work = self._comm.all_reduce(bucket.memory, "sum", async_op=True)
                return
            if codec is None:
                self._comm.all_reduce(bucket.memory, "avg" if bucket.scale == 1.0 else "sum")
                bucket.found = bucket.read_header()
            else:
                self._comm.all_reduce(bucket.words, "avg")
                bucket.found = bucket.read_header()
                codec.average_masked(bucket.flat, self._comm, bucket.shapes, [had for had, _ in bucket.found])
        except CommError as error:
            error.message += f" (while averaging the gradients of {bucket.name})"
            raise

    def _wait(self, bucket: Bucket) -> None:
        """Return when the bucket holds the means."""
        work, bucket.work = bucket.work, None
        if work is not None:
            try:
                work.wait()
            except CommError as error:
                error.message += f" (while averaging the gradients of {bucket.name})"
                raise
            bucket.found = bucket.read_header()

    def _take_late(self) -> None:
        """A shared parameter under re-entrant checkpointing: a part came when the rest was on its way, on some rank."""
        for bucket in self.buckets:
            bucket.add_late()
            self._reduce(bucket)
            self._wait(bucket)

    def begin(self) -> None:
        """Make ready for the next pass."""
        for bucket in self.buckets:
            if bucket.work is not None:
                self._give_up(bucket)
            bucket.begin()
        self._factor, self._next = None, 0
        self._halted = self._complete = self.asked = self.uneven = False

    # -- a pass that fails ----------------------------------------------------------------------
    def fail(self) -> bool:
        """Drop a pass that was broken off; whether other ranks may have received a part of it.

        If none left, others may still be in their own pass, and break it off later. So the next try of this rank keeps
        a copy of what it sends, from which it can send again.
        """
        started = self._next > 0
        left = started and not self._complete
        self._repeats = not left and not started
        return left

    def _rewind(self, aborted: AbortedError) -> None:
        """Go back to where no bucket had started, with other communicators: another rank's pass has failed."""
        for bucket in self.buckets:
            self._give_up(bucket)
            bucket.rewind()
        self._factor, self._next = None, 0
        self._halted = False
        try:
            self._comm = self._reconnect()
        except AbortedError as error:
            # For good, and for the same reason.
            raise aborted from error

    def _give_up(self, bucket: Bucket) -> None:
        """Wait for what is under way, whatever comes of it, so that the memory can be used again."""
        # The caller that started it gets an error already.
        with suppress(CommError):
            self._wait(bucket)
