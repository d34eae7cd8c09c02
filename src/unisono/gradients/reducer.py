"""Reduction of buckets: its time, its order, and its method, plain or by a codec that sends less."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

import torch

from unisono.communicator import Communicator, engine_of
from unisono.core.tensors import HALVES
from unisono.core.tracing import SINK, TraceEvent, observed_now, span
from unisono.core.types import Work
from unisono.errors import AbortedError, CommError
from unisono.gradients.bucket import GradientBucket
from unisono.gradients.weights import Weights
from unisono.utils.backward_pass import SavedGradients
from unisono.utils.flatten import plan_buckets
from unisono.utils.parameters import Named

if TYPE_CHECKING:
    from unisono.compression.codec import Codec

__all__ = ["Reducer", "codec_for"]


def codec_for(compression: str | Codec | Callable[[], Codec] | None) -> Codec | None:
    """Return the codec that a user's argument stands for."""
    if compression is None:
        return None
    from unisono.compression.codec import resolve

    return resolve(compression)


class Reducer:
    """Reducer that starts each bucket as soon as it and all before it are full: the same order on all ranks.

    The last bucket waits for the end of the pass: its rank then knows the flags to send. Where the calling thread would
    have to do the reduction, all buckets wait, and the sum is divided, which is more exact and touches less memory.
    Where the backend progresses by itself, contributions are divided while they are copied into the bucket.

    Args:
        named: All parameters, with their names.
        comm: Used for nothing else at the same time.
        codec: Cloned for each bucket of real numbers; None reduces the gradients uncompressed.
        sizes: Maximum bytes of a bucket, and of the first one if that differs.
        weights: Queried before the first bucket of a step for the factor of this rank's gradients.
        saved: p.grad from before the pass: it is added to the new gradients.
        reconnect: Returns another communicator after a failed pass has aborted the old one. Collective.

    Attributes:
        background: Whether a bucket is sent while others fill.
        buckets: The buckets, in order.
        where: For each parameter that has a bucket, the bucket and its slot there.
        asked: Whether any rank made each request in this step: about thawed parameters, and used gradients.
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
        self._names = [name for name, _ in named]
        self._parameters = [p for _, p in named]
        self._comm = comm
        self._codec = codec
        self._weights = weights
        self._saved = saved
        self._reconnect = reconnect
        self._cap, self._first = sizes
        self.background: bool = comm.overlaps and codec is None
        self.buckets: list[GradientBucket] = []
        self.where: dict[int, tuple[GradientBucket, int]] = {}
        self._codecs: dict[tuple[int, ...], Codec] = {}
        self._factor: float | None = None
        self._repeats = False
        self._next = 0
        self._halted = self._complete = False
        self.uneven: bool = False
        self.asked: list[bool] = [False, False]

    # -- buckets --------------------------------------------------------------------------------
    def add(self, order: Sequence[int]) -> None:
        """Make buckets for these parameters, after those that there are. Collective."""
        for indices in plan_buckets(self._parameters, order, self._cap, None if self.buckets else self._first):
            members = [self._parameters[i] for i in indices]
            first = self._names[indices[0]]
            last = self._names[indices[-1]]
            name = repr(first) if first == last else f"{first!r} to {last!r}"
            bucket = GradientBucket(indices, members, self._memory, self._scale(members[0].dtype), name)
            self.buckets.append(bucket)
            self.where.update((index, (bucket, slot)) for slot, index in enumerate(indices))

    def rearrange(self, seen: Sequence[int]) -> None:
        """Recreate the buckets, in the order in which gradients first arrived. Collective."""
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
        """Factor applied to each contribution as it is copied into a bucket of this dtype."""
        # An average of halves divides them first, to which a power of two is exact: then it is cheaper here.
        first = dtype in HALVES and self._codec is None and self._comm.size.bit_count() == 1
        return 1 / self._comm.size if self.background or first else 1.0

    def _memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate memory that the backend reduces fastest. Collective."""
        if device.type == "cpu":
            # If a failed pass has aborted the communicator, use plain memory until it is replaced.
            with suppress(AbortedError):
                return self._comm.empty(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=device)

    def has_taken(self, index: int) -> bool:
        """Return whether this rank's gradient of a parameter is in its bucket."""
        bucket, slot = self.where.get(index, (None, 0))
        return bucket is not None and bool(bucket.inside[slot])

    def has_mean(self, index: int) -> bool:
        """Return whether any rank had a gradient of a parameter in this pass."""
        bucket, slot = self.where.get(index, (None, 0))
        return bucket is not None and bucket.found[slot][0]

    def codec_of(self, bucket: GradientBucket) -> Codec | None:
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
        """The reduction of the first bucket, if it is in progress."""
        return self.buckets[0].work if self.buckets else None

    def advance(self) -> None:
        """Start the due buckets: the full ones except the last; none where that would block the pass."""
        if not self.background or self._halted:
            return
        with torch.no_grad():
            try:
                while self._next < len(self.buckets) - 1 and 0 not in self.buckets[self._next].inside:
                    self._start()
            except AbortedError:
                # The end of the pass handles it, unless this rank's pass fails by itself before.
                self._halted = True

    def finish(self, arrived: Set[int], first: int = 0, *, requests: Sequence[bool] = ()) -> None:
        """Start the remaining buckets, and wait for all.

        If another rank's pass has failed, and no mean of this pass was used yet, the reduction is repeated with that
        rank's next pass.

        Args:
            arrived: Indices of the parameters with a gradient that may be in no bucket yet.
            first: The first bucket to wait for.
            requests: Whether this rank makes each request to all ranks, after that of late gradients.
        """
        while True:
            try:
                self._reduce_all(arrived, first, requests)
                break
            except AbortedError as aborted:
                if first or not all(bucket.can_rewind() for bucket in self.buckets):
                    raise
                self._rewind(aborted)
        self._complete = True
        self._repeats = False
        if self.buckets:
            late, *self.asked = self.buckets[-1].asked
            if late:
                self._take_late()
        for bucket in self.buckets[first:]:
            self.uneven = self.uneven or bucket.found is not bucket.complete

    def assign(self) -> None:
        """Assign the means to p.grad."""
        for bucket in self.buckets:
            bucket.assign_grads(self._saved)
        for index in self._saved.aside:
            if index not in self.where:
                self._saved.keep(index)

    def _reduce_all(self, arrived: Set[int], first: int, requests: Sequence[bool]) -> None:
        late = any(map(GradientBucket.is_late, self.buckets[: self._next]))
        while self._next < len(self.buckets):
            self._start(arrived, (late, *requests))
        if self._factor is None:
            self._factor = self._weights.shared_factor()
        for bucket in self.buckets[first:]:
            if bucket.work is not None and bucket.observed_s is None:
                self._wait(bucket)
            elif bucket.work is not None:
                with self._observed(bucket):
                    self._wait(bucket)

    def _start(self, arrived: Set[int] = frozenset(), requests: Sequence[bool] = ()) -> None:
        """Begin the reduction of the next bucket; its memory belongs to that until `_wait`."""
        bucket = self.buckets[self._next]
        last = self._next == len(self.buckets) - 1
        if (failure := self._comm.exception()) is not None:
            # Another rank's pass has failed.
            raise failure.locate(rank=self._comm.rank, size=self._comm.size, operation="all_reduce")
        if self._factor is None:
            self._factor = self._weights.shared_factor() if self._weights.uneven else self._weights.factor
        if not bucket.memory.is_cpu:
            bucket.follow_streams()
        bucket.finalize(
            arrived, self._saved.aside, self._factor, self._weights.here, requests if last else (), self._repeats
        )
        # Before the reduction, which may end in an error on this rank alone.
        self._next += 1
        with self._observed(bucket) if observed_now() else nullcontext():
            self._reduce(bucket)

    def _reduce(self, bucket: GradientBucket) -> None:
        codec = None if self._codec is None else self.codec_of(bucket)
        try:
            if self.background:
                bucket.work = self._comm.all_reduce(bucket.memory, "sum", async_op=True)
                return
            if codec is None:
                self._comm.all_reduce(bucket.memory, "avg" if bucket.scale == 1.0 else "sum")
                bucket.found = bucket.read_header()
            else:
                self._comm.all_reduce(bucket.header, "avg")
                bucket.found = bucket.read_header()
                used = [had for had, _ in bucket.found]
                for view, had in zip(bucket.views, used, strict=True):
                    if not had:
                        view.zero_()
                codec.average_masked(bucket.flat, self._comm, bucket.shapes, used)
        except CommError as error:
            error.add_note(f"while averaging the gradients of {bucket.name}")
            raise

    def _wait(self, bucket: GradientBucket) -> None:
        """Return when the bucket holds the means."""
        work = bucket.work
        bucket.work = None
        if work is not None:
            try:
                work.wait()
            except CommError as error:
                error.add_note(f"while averaging the gradients of {bucket.name}")
                raise
            bucket.found = bucket.read_header()

    def _take_late(self) -> None:
        """Add parts of shared parameters that arrived, under re-entrant checkpointing, when the rest had been sent."""
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
        self._factor = None
        self._next = 0
        self._halted = self._complete = self.uneven = False
        self.asked = [False, False]

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
        self._factor = None
        self._next = 0
        self._halted = False
        try:
            self._comm = self._reconnect()
        except AbortedError as error:
            # For good, and for the same reason.
            raise aborted from error

    def _give_up(self, bucket: GradientBucket) -> None:
        """Wait for a bucket's pending reduction, ignoring its result, so that the memory can be reused."""
        # The caller that started it gets an error already.
        with suppress(CommError):
            self._wait(bucket)

    @contextmanager
    def _observed(self, bucket: GradientBucket) -> Iterator[None]:
        """Record the block as the start of a bucket's reduction, or its wait; report the bucket once it is reduced."""
        group = engine_of(self._comm).group
        nbytes = bucket.memory.nbytes
        if bucket.observed_s is None:
            bucket.observed_s = time.perf_counter()
        with span("bucket_wait", f"bucket {bucket.name}", group, nbytes, starts=bucket.work is None):
            yield
        if bucket.work is not None:
            return
        start = bucket.observed_s
        bucket.observed_s = None
        if (sink := SINK.get()) is not None:
            detail = {"parameters": [self._names[index] for index in bucket.indices]}
            end = time.perf_counter()
            world_rank = group.members[group.rank]
            sink(TraceEvent("bucket", bucket.name, group.name, group.rank, start, end, nbytes, detail, world_rank))
