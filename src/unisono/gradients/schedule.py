"""In which order buckets are reduced, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from unisono.gradients.bucket import Bucket
from unisono.gradients.naming import About
from unisono.gradients.plan import Named, plan_buckets
from unisono.gradients.reducer import Reducer
from unisono.gradients.weights import Weights

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
        gather: Gives what all ranks gave it; called where a gradient came too late on any of them.

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
        gather: Callable[[list[int]], list[list[int]]],
    ) -> None:
        self._names, self._parameters = [name for name, _ in named], [p for _, p in named]
        self.reducer, self._weights, self._gather = reducer, weights, gather
        self._cap, self._first = sizes
        self.buckets: list[Bucket] = []
        self.where: dict[int, tuple[Bucket, int]] = {}
        self._factor: float | None = None
        self._next = self._pass = 0
        self._spoiled = False
        self.asked = False

    def add(self, order: Sequence[int]) -> None:
        """Make buckets for these parameters, after those that there are. Collective."""
        for indices in plan_buckets(self._parameters, order, self._cap, None if self.buckets else self._first):
            members = [self._parameters[i] for i in indices]
            reducer = self.reducer
            bucket = Bucket(indices, members, reducer.memory, reducer.scale(members[0].dtype), reducer.ready)
            self.buckets.append(bucket)
            self.where.update((index, (bucket, slot)) for slot, index in enumerate(indices))

    def rearrange(self, seen: Sequence[int]) -> None:
        """Make the buckets anew, in the order in which gradients were first seen to come. Collective."""
        known = list(self.where)
        first = [i for i in seen if i in self.where]
        order = [*first, *(i for i in known if i not in set(first))]
        if order != known:
            self.clear()
            self.add(order)

    def give_back(self) -> None:
        """What has been taken, and was not reduced yet, becomes `p.grad` again."""
        with torch.no_grad():
            for bucket in self.buckets:
                if not bucket.started:
                    bucket.give_back()

    def clear(self) -> None:
        """Forget all buckets."""
        self.buckets.clear()
        self.where.clear()

    def open(self) -> None:
        """A pass has begun, or one inside it. What fills the first bucket may be summed by ranks that wait already."""
        if self.buckets and self._weights.even:
            self.buckets[0].open()

    def advance(self) -> None:
        """Start the buckets whose turn it is, the full ones but for the last; none where it would hold up the pass."""
        if not self.reducer.background:
            return
        with torch.no_grad():
            while self._next < len(self.buckets) - 1 and not self.buckets[self._next].missing:
                self._start()

    def _start(self, asks: bool = False) -> None:
        bucket, last = self.buckets[self._next], self._next == len(self.buckets) - 1
        with self._about(bucket):
            if not self._weights.even:
                bucket.withdraw()
            if self._factor is None:
                self._factor = self._weights.agree()
            bucket.take_rest()
            about = (any(b.late for b in self.buckets), asks) if last else ()
            # A pass that follows one of which others have summed a part is another one than theirs.
            bucket.fill(self._factor, self._weights.here, self._pass + self._spoiled, about)
            # Before the reduction, which may end in an error on this rank alone.
            self._next += 1
            self.reducer.start(bucket)

    def finish(self, first: int = 0, *, asks: bool = False) -> list[tuple[Bucket, list[tuple[bool, bool]]]]:
        """Start what is left and wait for all; the means are given out. As `Bucket.present` tells it of each.

        Args:
            first: The first bucket to wait for.
            asks: Whether this rank has something to ask of all ranks.
        """
        while self._next < len(self.buckets):
            self._start(asks)
        if self._factor is None:
            self._factor = self._weights.agree()
        found = []
        for bucket in self.buckets[first:]:
            if bucket.found is None:
                with self._about(bucket):
                    self.reducer.finish(bucket)
                    bucket.found = bucket.present()
            found.append((bucket, bucket.found))
        if self.buckets:
            late, self.asked = self.buckets[-1].asked
            if late:
                self._take_late()
        for bucket, present in found:
            self._hand_out(bucket, present)
        return found

    def _take_late(self) -> None:
        """A shared parameter under re-entrant checkpointing: a part came when the rest was on its way, on some rank."""
        late = self._gather([index for index, bucket in enumerate(self.buckets) if bucket.late])
        for index in sorted(set().union(*late)):
            bucket = self.buckets[index]
            with self._about(bucket):
                bucket.add_late()
                self.reducer.start(bucket)
                self.reducer.finish(bucket)
                bucket.late = False

    def _hand_out(self, bucket: Bucket, present: list[tuple[bool, bool]]) -> None:
        try:
            bucket.hand_out(present)
        except RuntimeError as error:
            raise RuntimeError(
                f"means no longer fit the parameters among {self._called(bucket)}: the model's dtype or device has "
                "changed since the averager was made. remove() it before, and make another one after that"
            ) from error

    def begin(self) -> None:
        """Make ready for the next step, also after one that was broken off."""
        untouched = True
        for bucket in self.buckets:
            self.reducer.give_up(bucket)
            untouched &= bucket.begin()
        # What was broken off before anything went out is no pass to the others, unless they have summed a part of it.
        self._pass += self._next > 0
        self._spoiled = not self._next and not untouched
        self._next, self._factor = 0, None
        self.asked = False

    def _about(self, bucket: Bucket) -> AbstractContextManager[None]:
        return About(f"averaging the gradients of {self._called(bucket)}")

    def _called(self, bucket: Bucket) -> str:
        first, last = self._names[bucket.indices[0]], self._names[bucket.indices[-1]]
        return repr(first) if first == last else f"{first!r} to {last!r}"
