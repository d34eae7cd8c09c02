"""In which order buckets are reduced, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unisono.errors import AbortedError
from unisono.gradients.bucket import Bucket
from unisono.gradients.plan import Named, plan_buckets
from unisono.gradients.reducer import Reducer
from unisono.gradients.saved_gradients import SavedGradients
from unisono.gradients.weights import Weights
from unisono.types import Work

__all__ = ["BucketSchedule"]


class BucketSchedule:
    """Each bucket is reduced as soon as it and all before it are full, so the order is the same on all ranks.

    The last one waits for the end of the pass: by then its rank knows what it has to tell the others. All do where the
    calling thread would have to reduce them.

    Args:
        named: All parameters, with their names.
        reducer: What reduces one bucket.
        sizes: Most bytes of a bucket, and of the first one if that is another number.
        weights: Asked before the first bucket of a step what to multiply this rank's gradients by.
        saved: What p.grad held before the pass: it is added to what came, and removed there.
        reconnect: Makes new communicators where a failed pass has aborted the old ones. Collective.

    Attributes:
        buckets: In their order.
        where: For each parameter that has a bucket, which one, and its place there.
        asked: Whether any rank said in this step that it has something to ask.
    """

    def __init__(
        self,
        named: Named,
        reducer: Reducer,
        sizes: tuple[int, int | None],
        weights: Weights,
        saved: SavedGradients,
        reconnect: Callable[[], None],
    ) -> None:
        self._names, self._parameters = [name for name, _ in named], [p for _, p in named]
        self.reducer, self._weights = reducer, weights
        self._saved, self._reconnect = saved, reconnect
        self._cap, self._first = sizes
        self.buckets: list[Bucket] = []
        self.where: dict[int, tuple[Bucket, int]] = {}
        self._factor: float | None = None
        self._repeats = False
        self._next = 0
        self._failed = self._halted = self._complete = self.asked = False

    def add(self, order: Sequence[int]) -> None:
        """Make buckets for these parameters, after those that there are. Collective."""
        for indices in plan_buckets(self._parameters, order, self._cap, None if self.buckets else self._first):
            members = [self._parameters[i] for i in indices]
            reducer = self.reducer
            first, last = self._names[indices[0]], self._names[indices[-1]]
            name = repr(first) if first == last else f"{first!r} to {last!r}"
            bucket = Bucket(indices, members, reducer.memory, reducer.scale(members[0].dtype), name)
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

    @property
    def first_work(self) -> Work | None:
        """The reduction of the first bucket, if it is under way."""
        return self.buckets[0].work if self.buckets else None

    def holding(self, grad: torch.Tensor) -> Bucket | None:
        """The bucket in whose memory a gradient lies, if any."""
        return next((bucket for bucket in self.buckets if bucket.holds(grad)), None)

    def clear(self) -> None:
        """Forget all buckets."""
        self.buckets.clear()
        self.where.clear()

    def open(self) -> None:
        """A pass has begun."""
        if self._failed:
            self.begin()

    def advance(self) -> None:
        """Start the buckets whose turn it is, the full ones but for the last; none where it would hold up the pass."""
        if not self.reducer.background or self._halted:
            return
        with torch.no_grad():
            try:
                while self._next < len(self.buckets) - 1 and not self.buckets[self._next].missing:
                    self._start()
            except AbortedError:
                # The end of the pass sees to it, unless this rank's pass fails by itself before.
                self._halted = True

    def _start(self, asks: bool = False) -> None:
        bucket, last = self.buckets[self._next], self._next == len(self.buckets) - 1
        if (failure := self.reducer.comm.exception()) is not None:
            # Another rank's pass has failed.
            raise failure
        if self._factor is None:
            self._factor = self._weights.agree()
        bucket.take_rest(self._saved.aside)
        about = (any(b.late for b in self.buckets), asks) if last else ()
        bucket.fill(self._factor, self._weights.here, about, self._repeats)
        # Before the reduction, which may end in an error on this rank alone.
        self._next += 1
        self.reducer.start(bucket)

    def finish(self, first: int = 0, *, asks: bool = False) -> list[tuple[Bucket, list[tuple[bool, bool]]]]:
        """Start what is left and wait for all; the means are given out. As `Bucket.present` tells it of each.

        Where another rank's pass has failed, and nothing of this one's was used yet, it is done again with that rank's
        next pass.

        Args:
            first: The first bucket to wait for.
            asks: Whether this rank has something to ask of all ranks.
        """
        while (found := self._reduced(first, asks)) is None:
            pass
        self._complete, self._repeats = True, False
        if self.buckets:
            late, self.asked = self.buckets[-1].asked
            if late:
                self._take_late()
        try:
            for bucket, present in found:
                bucket.hand_out(present)
        except RuntimeError as error:
            raise RuntimeError(
                f"means no longer fit the parameters among {bucket.name}: the model's dtype or device has changed "
                "since the averager was made. remove() it before, and make another one after that"
            ) from error
        return found

    def _reduced(self, first: int, asks: bool) -> list[tuple[Bucket, list[tuple[bool, bool]]]] | None:
        """Each bucket with what `Bucket.present` says; None if another rank's pass failed, and all is to be redone."""
        found = []
        try:
            while self._next < len(self.buckets):
                self._start(asks)
            if self._factor is None:
                self._factor = self._weights.agree()
            for bucket in self.buckets[first:]:
                if bucket.found is None:
                    self.reducer.finish(bucket)
                    bucket.found = bucket.present()
                found.append((bucket, bucket.found))
        except AbortedError as aborted:
            if first or not all(bucket.can_rewind() for bucket in self.buckets):
                raise
            for bucket in self.buckets:
                self.reducer.give_up(bucket)
                bucket.rewind()
            self._rest()
            try:
                self._reconnect()
            except AbortedError as error:
                # For good, and for the same reason.
                raise aborted from error
            return None
        return found

    def _take_late(self) -> None:
        """A shared parameter under re-entrant checkpointing: a part came when the rest was on its way, on some rank."""
        for bucket in self.buckets:
            bucket.add_late()
            self.reducer.start(bucket)
            self.reducer.finish(bucket)
            bucket.late = False

    def begin(self) -> None:
        """Make ready for the next pass."""
        for bucket in self.buckets:
            if bucket.work is not None:
                self.reducer.give_up(bucket)
            bucket.begin()
        self._rest()

    def _rest(self) -> None:
        self._factor = None
        self._next = 0
        self._failed = self._halted = self._complete = self.asked = False

    def fail(self) -> bool:
        """Drop a pass that was broken off; whether other ranks may have received a part of it.

        If none left, others may still be in their own pass, and break it off later. So the next try of this rank keeps
        a copy of what it sends, from which it can send again.
        """
        started = self._next > 0
        left = started and not self._complete
        self._repeats, self._failed = not left and not started, True
        return left
