"""Inside of `GradientAverager`: hooks, backward passes and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from unisono.communicator import Communicator
from unisono.gradients.averager_comms import AveragerComms
from unisono.gradients.backward_pass import BackwardPass, adds_to_leaves, current_pass, watch_outputs
from unisono.gradients.bucket import Bucket
from unisono.gradients.buckets import broadcast_all, share
from unisono.gradients.hooks import Hooks
from unisono.gradients.naming import About, check_skipped
from unisono.gradients.parameter_registry import ParameterRegistry
from unisono.gradients.plan import agree_on_parameters, bucket_sizes, in_bytes, named_parameters
from unisono.gradients.reducer import Reducer, codec_for
from unisono.gradients.saved_gradients import SavedGradients
from unisono.gradients.schedule import BucketSchedule
from unisono.gradients.sparse import average_sparse, sparse_parameters
from unisono.gradients.weights import Weights

if TYPE_CHECKING:
    from unisono.compression.codec import Codec

__all__ = ["AveragerPasses"]


class AveragerPasses:
    """Base of `GradientAverager`, which describes the arguments: what runs in hooks."""

    def __init__(
        self,
        model: torch.nn.Module | Iterable[torch.Tensor],
        comm: Communicator,
        bucket_cap_mb: float | None,
        first_bucket_mb: float | None,
        compression: str | Codec | Callable[[], Codec] | None,
        total: bool,
        find_unused: bool,
        sync_buffers: bool,
    ) -> None:
        self._named = named_parameters(model)
        self._names, self._parameters = [n for n, _ in self._named], [p for _, p in self._named]
        self._model = model if isinstance(model, torch.nn.Module) else None
        self._sizes = in_bytes(bucket_cap_mb), in_bytes(first_bucket_mb)
        self._find_unused, self._sync_buffers, self._compression = find_unused, sync_buffers, compression
        self._weights, self._total, self._steps = Weights(comm, total), total, [0]

    def _attach(self, comm: Communicator, *, sync_parameters: bool) -> None:
        self._registry = ParameterRegistry(self._model, self._named)
        codec = codec_for(self._compression)
        settings = (*self._sizes, self._total, self._find_unused, self._sync_buffers, repr(codec))
        buffers = list(self._model.named_buffers()) if self._model is not None and sync_parameters else []
        agree_on_parameters([*self._named, *buffers], comm, settings)
        if sync_parameters:
            share([*self._named, *buffers], comm)
        self.rank, self.size = comm.rank, comm.size
        self._comms = AveragerComms(comm)
        reducer = Reducer(self._comms.data, codec)
        how = {"background": reducer.background, "compressed": codec is not None}
        sizes = bucket_sizes(self._sizes, self._parameters, comm, **how)
        spread = sparse_parameters(self._model) if self._model is not None else set()
        self._spread = {i for i, p in enumerate(self._parameters) if id(p) in spread}
        self._sparse: list[int] = []
        # Hooks of the user's are to see what they would see without an averager.
        hooked = {i for i, p in enumerate(self._parameters) if getattr(p, "_post_accumulate_grad_hooks", None)}
        self._stays = self._spread | hooked
        self._saved = SavedGradients(self._parameters, self._stays, self._lies_in_buckets)
        self._schedule = BucketSchedule(
            *(self._named, reducer, sizes, self._weights),
            saved=self._saved,
            reconnect=self._reconnect,
        )
        self._where = self._schedule.where
        on_cpu = all(p.is_cpu for p in self._parameters)
        self._pass = BackwardPass(self._begin, self._end, self._fail, one_thread=on_cpu)
        self._short = Hooks(self._arrived, self._schedule.advance)
        self._held: set[int] = set()
        self._owed: set[int] = set()
        self._syncing, self._reconnected = True, False
        # Where buckets travel while others fill, the first step of all ranks tells in which order gradients come.
        self._seen: dict[int, None] | None = {} if self._comms.data.overlaps and codec is None else None
        self._frozen = [i for i, p in enumerate(self._parameters) if not p.requires_grad]
        if self.size > 1:
            self._install()
        self._comms.ready()
        self._weights.attach(self._comms.control)
        self._weights.forget()

    def _install(self) -> None:
        self._registry.watch_gradients(self._make_before(), self._short.make)
        # The output is watched so that a pass is known that fails before it comes to a parameter, or comes to none.
        self._registry.watch_forward(self._check, self._watch_outputs, traced=self._find_unused)
        # Gradients come about in the reverse order of parameters.
        self._adopt([i for i, p in reversed(list(enumerate(self._parameters))) if p.requires_grad])

    def _reconnect(self) -> None:
        """Replace communicators that a failed pass has aborted. Collective."""
        self._comms.replace()
        self._schedule.reducer.comm = self._comms.data
        self._weights.attach(self._comms.control)
        self._reconnected = True

    # -- hooks ----------------------------------------------------------------------------------
    def _adopt(self, indices: Sequence[int]) -> None:
        """Average these parameters too, from now on."""
        self._schedule.add([i for i in indices if i not in self._spread])
        self._sparse += [i for i in indices if i in self._spread]
        self._place()

    def _place(self) -> None:
        self._short.place({i: where for i, where in self._where.items() if i not in self._stays})

    def _make_before(self) -> Callable[[torch.Tensor], None]:
        """A hook: a gradient is about to be added to a parameter's `p.grad`, or returned by `torch.autograd.grad`."""
        # Torch calls it for each parameter in each pass.
        current, running = current_pass, self._pass

        def before(gradient: torch.Tensor) -> None:
            if current() != running.running and running.is_new():
                self._enter()

        return before

    def _watch_outputs(self, returned: Any) -> None:
        # Where ranks may lack gradients, one whose pass comes to no parameter averages with the others.
        watch_outputs(returned, self._come if self._find_unused else self._pass.follow)

    def _come(self, gradient: torch.Tensor) -> None:
        """A hook: a pass comes to what the model returned."""
        if adds_to_leaves(self._registry.ids):
            self._enter()

    def _enter(self) -> None:
        """A backward pass is running."""
        number = current_pass()
        if number != self._pass.running and self._registry.hooked:
            self._pass.enter(number)
            if self._syncing and self._seen is None:  # In the first step the order is of interest, too.
                self._short.note(number)

    def _arrived(self, index: int, parameter: torch.Tensor) -> None:
        """A parameter's gradient has been added to `p.grad`."""
        self._enter()
        if not self._pass.is_open:
            return
        bucket, slot = self._where.get(index, (None, 0))
        if bucket is None or index in self._stays or not (self._syncing or bucket.came[slot]):
            self._held.add(index)
            return
        if self._seen is not None:
            self._seen[index] = None
        if bucket.arrived(slot):
            self._schedule.advance()

    # -- a pass ---------------------------------------------------------------------------------
    def _begin(self) -> None:
        self._comms.settle()
        if self._reconnected:
            self._schedule.rearrange([])
            self._place()
            self._reconnected = False
        self._saved.save()
        self._schedule.open()

    def _end(self) -> None:
        """All that is left to do for the gradients of a pass, and a look at what came."""
        self._short.note(-1)
        # An inner pass may have been in no_sync(); what counts is the outermost one.
        if not self._syncing:
            self._check()
            self._saved.merge()
            self._owed |= self._held
            self._held.clear()
            return
        self._complete()
        self._steps[-1] += 1
        if self._seen is not None and self._weights.active == self.size:
            seen, self._seen = list(self._seen), None
            self._schedule.rearrange(self._comms.control.broadcast_object(seen))
            self._place()

    def _fail(self) -> None:
        """Undo a pass that raised: p.grad and weights are as before. Other ranks that have a part of it fail too."""
        self._short.note(-1)
        self._saved.restore()
        self._held.clear()
        if self._schedule.fail():
            self._comms.abort_pass(
                "its backward pass failed when a part of it had been averaged, so that pass is dropped on all ranks: "
                "p.grad is as it was before. Go on with the next pass, or repeat this one on all ranks",
                self._schedule.first_work,
            )

    def _check(self) -> None:
        try:
            self._registry.check()
        except RuntimeError as error:
            self._comms.abort(str(error))
            raise

    def _lies_in_buckets(self, index: int, grad: torch.Tensor) -> bool:
        within = self._schedule.holding(grad)
        bucket, slot = self._where.get(index, (None, 0))
        if within is None or (within is bucket and bucket.is_place(slot, grad)):
            return within is not None
        raise RuntimeError(
            f"p.grad of {self._names[index]!r} is memory in which other gradients are averaged: it was taken from "
            "another parameter, or is a part of itself or turned. Give it a clone() instead"
        )

    # -- the end of a step ----------------------------------------------------------------------
    def _finish_step(self) -> None:
        self._check()
        arrived = self._owed | self._held
        for index in arrived & self._where.keys():
            bucket, slot = self._where[index]
            # It may have been set to None since.
            if self._has_gradient(index) and not bucket.started and not bucket.came[slot]:
                bucket.arrived(slot)
        thawed = [i for i in self._frozen if self._parameters[i].requires_grad] if self._frozen else []
        self._look_at(self._schedule.finish(asks=bool(thawed)))
        # Without a bucket there was no message to ask by.
        if self._schedule.asked or (thawed and not self._where):
            self._take_in(thawed)
        if self._sparse:
            lacking = [self._names[i] for i in self._sparse if i not in arrived and self._weights.here]
            sparse = [self._named[i] for i in self._sparse]
            average_sparse(sparse, self._comms.control, self._weights, None if self._find_unused else lacking)
        if self._sync_buffers and self._model is not None:
            broadcast_all(self._model.buffers(), self._comms.control)

    def _has_gradient(self, index: int) -> bool:
        return self._parameters[index].grad is not None or index in self._saved.aside

    def _shadow(self) -> None:
        """Take part in a step of the ranks that still have data, with nothing."""
        for parameter in self._parameters:
            parameter.grad = None
        try:
            self._complete()
        except BaseException:
            self._fail()
            raise

    def _complete(self) -> None:
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._finish_step()
        else:
            self._finish_step()
        self._schedule.begin()
        self._weights.forget()
        self._saved.clear()
        self._owed.clear()
        self._held.clear()

    def _look_at(self, found: Sequence[tuple[Bucket, list[tuple[bool, bool]]]]) -> None:
        """`MismatchError` on all ranks if some lack a gradient that others have."""
        if self._find_unused or not any(had and lacked for b, p in found if p is not b.complete for had, lacked in p):
            return
        lacking = [
            self._names[i]
            for bucket, _ in found
            for i, came in zip(bucket.indices, bucket.came, strict=True)
            if not came
        ]
        by_rank = self._comms.control.all_gather_object(lacking if self._weights.here else [])
        check_skipped(self._names, by_rank, self._weights.active, self._comms.control)

    def _take_in(self, thawed: list[int]) -> None:
        """Parameters that were frozen are no more: average what they have now, and from now on."""
        with About(f"comparing what is frozen; no longer so on rank {self.rank}: {[self._names[i] for i in thawed]}"):
            agree_on_parameters(self._named, self._comms.control)
        self._frozen = [i for i in self._frozen if i not in thawed]
        known = len(self._schedule.buckets)
        self._adopt(thawed)
        for index in thawed:
            if index in self._where and self._has_gradient(index):
                bucket, slot = self._where[index]
                bucket.arrived(slot)
        self._look_at(self._schedule.finish(first=known))
