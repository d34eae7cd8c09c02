"""Reduction of the buckets in one step: when, in which order, and whether uncompressed or through a codec."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext, suppress
from itertools import compress

import torch

from unisono.communicator import engine_of
from unisono.core.tracing import SINK, TraceEvent, observed_now, span
from unisono.errors import CommError
from unisono.gradients.bucket import BucketContents
from unisono.gradients.buckets import Buckets
from unisono.gradients.caller_gradients import SavedGradients
from unisono.gradients.weights import Weights

__all__ = ["Reduction"]


class Reduction:
    """Reduction of all buckets in one step: a bucket's reduction starts once it and all earlier buckets are full.

    The last bucket's reduction starts at the end of the backward pass, when the requests in its header are known. If
    the backend makes no progress in the background, all reductions start at the end of the backward pass, because the
    calling thread has to run them; each sum is then divided after the reduction, which is more accurate and accesses
    less memory than dividing the contributions. If the backend makes progress in the background, contributions are
    divided while they are copied into the bucket.

    A `Reduction` is dropped when its step has ended, or when the backward pass after a failed pass begins. Backward
    passes in `no_sync` belong to the step of the next pass outside `no_sync`.

    Args:
        buckets: The buckets, with the communicators, of which only `data` is used.
        weights: Source of the factor for this rank's gradients; the factor is read before the first bucket's reduction
            starts.
        keeps_copies: Whether to keep a copy of sent buckets, so that they can be sent again.

    Attributes:
        contents: Contents of each bucket.
        sent: Number of buckets whose reduction has started. Reductions start in the order of `contents`.
        asked: For each kind of request (unfrozen parameters, used gradients), whether any rank made such a request in
            this step.
        uneven: Whether any rank lacked a gradient in this step.
    """

    def __init__(self, buckets: Buckets, weights: Weights, *, keeps_copies: bool = False) -> None:
        self._buckets = buckets
        self._weights = weights
        self._keeps_copies = keeps_copies
        self.contents: list[BucketContents] = list(map(BucketContents, buckets.ordered))
        self.sent: int = 0
        self._factor: float | None = None
        self.asked: Sequence[bool] = (False, False)
        self.uneven: bool = False

    def extend(self) -> None:
        """Append a `BucketContents` for each new bucket."""
        self.contents += map(BucketContents, self._buckets.ordered[len(self.contents) :])

    def taken(self) -> set[int]:
        """Return the parameters whose gradient on this rank is in its bucket."""
        taken: set[int] = set()
        for contents in self.contents:
            taken.update(compress(contents.bucket.indices, contents.inside))
        return taken

    def has_mean(self, index: int) -> bool:
        """Return whether any rank had a gradient of a parameter in this pass."""
        number, slot = self._buckets.where.get(index, (None, 0))
        return number is not None and self.contents[number].found[slot][0]

    # -- in a pass ------------------------------------------------------------------------------
    @torch.no_grad()
    def advance(self, saved: SavedGradients) -> None:
        """Start reducing full buckets, except the last. Raises `AbortedError` if another rank's pass has failed."""
        while self.sent < len(self.contents) - 1 and 0 not in self.contents[self.sent].inside:
            self._start(saved)

    def reduce_all(
        self, saved: SavedGradients, arrived: Set[int], first: int = 0, *, requests: Sequence[bool] = ()
    ) -> None:
        """Reduce the remaining buckets, and wait for all. Raises `AbortedError` if another rank's pass has failed.

        Args:
            saved: Gradients from before the pass, to be added to the new gradients.
            arrived: Indices of the parameters that received a gradient, whether or not it is in a bucket yet.
            first: The first bucket to wait for.
            requests: For each kind of request except late gradients, whether this rank makes such a request.
        """
        # Look for late gradients before another bucket's reduction starts, because `finalize` clears p.grad.
        late = any(map(BucketContents.is_late, self.contents[: self.sent]))
        while self.sent < len(self.contents):
            self._start(saved, arrived, (late, *requests))
        # Exchange the weights even if there are no buckets: in join(), other ranks wait for this rank to do so.
        if self._factor is None:
            self._factor = self._weights.shared_factor()
        for contents in self.contents[first:]:
            if contents.work is not None and contents.observed_s is None:
                self._wait(contents)
            elif contents.work is not None:
                with self._observed(contents):
                    self._wait(contents)

    def conclude(self, first: int = 0) -> None:
        """Evaluate the reduced headers. If a gradient was late on any rank, reduce again, which is collective."""
        if self.contents:
            late, *self.asked = self.contents[-1].asked
            if late:
                # With re-entrant checkpointing, a part of a shared parameter's gradient may arrive after its bucket was
                # sent. All ranks reduce all buckets again, because no rank knows which buckets lack late gradients on
                # other ranks.
                for contents in self.contents:
                    contents.add_late()
                    self._reduce(contents)
                    self._wait(contents)
        for contents in self.contents[first:]:
            self.uneven = self.uneven or contents.found is not contents.bucket.complete

    def assign(self, saved: SavedGradients) -> None:
        """Assign the means to p.grad."""
        for contents in self.contents:
            contents.assign_grads(saved)
        # Restore the gradients that were set aside but belong to no bucket, such as those of frozen parameters.
        if saved.aside:
            saved.restore([index for index in saved.aside if index not in self._buckets.where])

    def _start(self, saved: SavedGradients, arrived: Set[int] = frozenset(), requests: Sequence[bool] = ()) -> None:
        """Start the reduction of the next bucket, whose memory must not be touched until `_wait`."""
        contents = self.contents[self.sent]
        last = self.sent == len(self.contents) - 1
        comm = self._buckets.comms.data
        # Check for a failure before p.grad is cleared, so that the pass can be undone without `rewind`.
        if (failure := comm.exception()) is not None:
            # Another rank's pass has failed.
            raise failure.locate(rank=comm.rank, size=comm.size, operation="all_reduce")
        if self._factor is None:
            self._factor = self._weights.shared_factor() if self._weights.uneven else self._weights.factor
        if not contents.bucket.memory.is_cpu:
            contents.follow_streams()
        flags = requests if last else ()
        contents.finalize(arrived, saved.aside, self._factor, self._weights.here, flags, self._keeps_copies)
        # Count the bucket as sent before reducing it: a reduction that fails only on this rank may have reached other
        # ranks.
        self.sent += 1
        with self._observed(contents) if observed_now() else nullcontext():
            self._reduce(contents)

    def _reduce(self, contents: BucketContents) -> None:
        bucket = contents.bucket
        comm = self._buckets.comms.data
        codec = None if self._buckets.codec is None else self._buckets.codec_of(bucket)
        try:
            if self._buckets.background:
                contents.work = comm.all_reduce(bucket.memory, "sum", async_op=True)
                return
            if codec is None:
                comm.all_reduce(bucket.memory, "avg" if bucket.scale == 1.0 else "sum")
                contents.found = contents.read_header()
            else:
                # Reduce the header first, because the codec needs to know which gradients exist. Don't compress the
                # header, because a codec would distort its flags.
                comm.all_reduce(bucket.header, "avg")
                contents.found = contents.read_header()
                used = [had for had, _ in contents.found]
                for view, had in zip(bucket.views, used, strict=True):
                    if not had:
                        view.zero_()
                codec.average_masked(bucket.flat, comm, bucket.shapes, used)
        except CommError as error:
            error.add_note(f"while averaging the gradients of {bucket.name}")
            raise

    def _wait(self, contents: BucketContents) -> None:
        """Wait for the reduction of a bucket, and read its header."""
        work = contents.work
        contents.work = None
        if work is not None:
            try:
                work.wait()
            except CommError as error:
                error.add_note(f"while averaging the gradients of {contents.bucket.name}")
                raise
            contents.found = contents.read_header()

    # -- a pass that fails ----------------------------------------------------------------------
    def can_rewind(self) -> bool:
        """Return whether this rank has a copy of each sent bucket, and so can restart the reduction."""
        return all(map(BucketContents.can_rewind, self.contents))

    def rewind(self) -> None:
        """Undo the reductions of all buckets, because another rank's pass has failed and will be repeated."""
        self.give_up()
        for contents in self.contents:
            contents.rewind()
        self.sent = 0
        # Compute the factor again, because the failed rank may set a different weight for its next pass.
        self._factor = None

    def give_up(self) -> None:
        """Wait for pending reductions and ignore their results, so that the memory can be reused."""
        for contents in self.contents:
            # Ignore errors here, because the caller already gets the error of the failed pass.
            with suppress(CommError):
                self._wait(contents)

    @contextmanager
    def _observed(self, contents: BucketContents) -> Iterator[None]:
        """Trace the `with` block, which starts or awaits a bucket's reduction; report the bucket once it is reduced."""
        group = engine_of(self._buckets.comms.data).group
        bucket = contents.bucket
        nbytes = bucket.memory.nbytes
        if contents.observed_s is None:
            contents.observed_s = time.perf_counter()
        with span("bucket_wait", f"bucket {bucket.name}", group, nbytes, starts=contents.work is None):
            yield
        if contents.work is not None:
            return
        start = contents.observed_s
        contents.observed_s = None
        if (sink := SINK.get()) is not None:
            detail = {"parameters": self._buckets.names_of(bucket)}
            end = time.perf_counter()
            world_rank = group.members[group.rank]
            sink(TraceEvent("bucket", bucket.name, group.name, group.rank, start, end, nbytes, detail, world_rank))
