"""Averaging of a model's gradients over one communicator: the hooks, and the phases of a backward pass."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from unisono.communicator import Communicator, boundaries_of, engine_of
from unisono.errors import AbortedError
from unisono.gradients.averager_comms import AveragerComms
from unisono.gradients.buckets import Buckets, codec_for
from unisono.gradients.caller_gradients import CallerHooks, SavedGradients
from unisono.gradients.parameter_registry import ParameterRegistry
from unisono.gradients.reduction import Reduction
from unisono.gradients.sparse import average_sparse, sparse_parameters
from unisono.gradients.weights import ErrorContext, Weights, check_skipped, used_gradients, warn_of_uneven_batches
from unisono.utils.backward_pass import BackwardTracker, PassOwner, adds_to_leaves, current_pass, watch_outputs
from unisono.utils.parameters import INIT_SYNC, Named, agree_on_parameters, share, share_buffers
from unisono.utils.pass_watch import PassWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from unisono.compression.codec import Codec
    from unisono.core.step_boundaries import StepBoundaries

__all__ = ["TRANSITIONS", "AveragerSettings", "Averaging", "Phase"]


class Phase(Enum):
    """Phase of an averager in a backward pass."""

    IDLE = "no pass runs"
    OPEN = "gradients arrive, and full buckets are sent"
    HELD = "gradients arrive, and no bucket is sent before the end"
    REDUCING = "all gradients of this rank are there, and the remaining buckets are reduced"
    AVERAGED = "all ranks have the means, so an error is this rank's alone"
    FAILED = "no pass runs; the last one was undone when a part of it had left"
    UNSENT = "no pass runs; the last one was undone before a part of it had left"


TRANSITIONS: dict[str, dict[Phase, Phase]] = {
    "begin": {Phase.IDLE: Phase.OPEN, Phase.FAILED: Phase.OPEN, Phase.UNSENT: Phase.OPEN},
    "begin held": {Phase.IDLE: Phase.HELD, Phase.FAILED: Phase.HELD, Phase.UNSENT: Phase.HELD},
    "hold": {Phase.OPEN: Phase.HELD},
    "reduce": {Phase.OPEN: Phase.REDUCING, Phase.HELD: Phase.REDUCING},
    "average": {Phase.REDUCING: Phase.AVERAGED},
    "finish": {Phase.OPEN: Phase.IDLE, Phase.HELD: Phase.IDLE, Phase.AVERAGED: Phase.IDLE},
    "fail": {phase: Phase.FAILED for phase in Phase if phase is not Phase.UNSENT},
    "fail unsent": dict.fromkeys(Phase, Phase.UNSENT) | {Phase.AVERAGED: Phase.FAILED, Phase.FAILED: Phase.FAILED},
}
"""For each event, the next phase by current phase; see `Averaging`."""


@dataclass(frozen=True, slots=True)
class AveragerSettings:
    """Arguments of a `GradientAverager`; all ranks must pass the same values.

    Attributes:
        sizes: Maximum bytes in a bucket, and in the first bucket; None for defaults.
        compression: The averager's `compression` argument, unchanged.
        total: Whether gradients are summed instead of averaged.
        find_unused: Whether a rank may lack a gradient that other ranks have.
        sync_buffers: Whether to broadcast rank 0's buffers after each backward pass.
        deterministic: Whether gradients are summed in a fixed order.
    """

    sizes: tuple[int | None, int | None]
    compression: str | Codec | Callable[[], Codec] | None
    total: bool
    find_unused: bool
    sync_buffers: bool
    deterministic: bool

    def described(self, codec: Codec | None) -> dict[str, Any]:
        """Return the settings by name, for comparison between ranks."""
        return {
            "bucket sizes": self.sizes,
            "average": self.total,
            "deterministic": self.deterministic,
            "find_unused": self.find_unused,
            "broadcast_buffers": self.sync_buffers,
            "compression": repr(codec),
        }


class Averaging(PassOwner):
    """Averaging of one model over one communicator; a new communicator needs a new object.

    Phases of a backward pass, and the events that lead from one to the next:

    ========  =====  ==========  ====  ========  ========  ======  ======  ===========
    phase     begin  begin held  hold  reduce    average   finish  fail    fail unsent
    ========  =====  ==========  ====  ========  ========  ======  ======  ===========
    IDLE      OPEN   HELD                                          FAILED  UNSENT
    OPEN                         HELD  REDUCING            IDLE    FAILED  UNSENT
    HELD                               REDUCING            IDLE    FAILED  UNSENT
    REDUCING                                     AVERAGED          FAILED  UNSENT
    AVERAGED                                               IDLE    FAILED  FAILED
    FAILED    OPEN   HELD                                          FAILED  FAILED
    UNSENT    OPEN   HELD                                                  UNSENT
    ========  =====  ==========  ====  ========  ========  ======  ======  ===========

    begin: The outermost autograd call is about to accumulate its first gradient.
    begin held: Like `begin`, but no bucket is sent before the pass ends: the calling thread would have to reduce
        buckets itself, or this rank has other models whose backward passes are watched.
    hold: A full bucket could not be sent, because another rank's pass has failed. This rank handles another rank's
        failure only at the end of its own pass: if its own pass fails before that, there is nothing to repeat.
    reduce: The outermost autograd call has succeeded outside `no_sync`. If another rank fails while this rank is in
        REDUCING, and this rank has copies of the buckets that it sent, the reduction is repeated with the failed rank's
        next pass.
    average: All buckets are reduced. In AVERAGED, late gradients are added, and errors that all ranks detect are
        raised.
    finish: The pass has ended, and p.grad is ready for the caller. In `no_sync`, nothing was reduced.
    fail: The pass has raised after this rank sent a bucket. If AVERAGED was not reached, all ranks drop the pass.
    fail unsent: The pass has raised before this rank sent a bucket. Other ranks may abort their current pass later, so
        this rank copies the buckets that it sends in its next pass. In IDLE, an autograd call that raises before it
        reaches a parameter also counts as `fail unsent`.

    `SavedGradients` holds the state of one pass, and `Reduction` the state of one step. Backward passes in `no_sync`
    belong to the step of the next pass outside `no_sync`.

    Args:
        model: The module; None if only parameters were passed.
        named: All parameters, with their names.
        comm: Communicator of the ranks whose gradients are averaged. Construction is collective.
        settings: Arguments of the averager.
        weights: The ranks' weights in each step.
        init_sync: Whether to broadcast rank 0's parameters and buffers now.
        owner: The averager.

    Attributes:
        phase: Phase of the backward pass.
        steps: Number of steps taken.
        syncing: Whether backward passes average gradients; False in `no_sync`.
        registry, comms, buckets: The averager's parameters, communicators and buckets.
        boundaries: Counter of the step boundaries (see `stop_requested`) that this rank has passed on `comm`.
    """

    waits = True

    def __init__(
        self,
        model: torch.nn.Module | None,
        named: Named,
        comm: Communicator,
        settings: AveragerSettings,
        weights: Weights,
        *,
        init_sync: bool,
        owner: object = None,
    ) -> None:
        # The tensor hooks keep this object alive, and `_owner` keeps the averager alive, even if the caller drops it.
        self._owner = owner
        self.phase: Phase = Phase.IDLE
        self.steps: int = 0
        self.syncing = True
        self._settings = settings
        self._weights = weights
        # A weak reference, so that a communicator that the program no longer uses is freed and leaves its group.
        self._engine = ref(engine_of(comm))
        # Create the registry before sending anything: it raises if the model already has an averager, perhaps on this
        # rank only.
        self.registry: ParameterRegistry = ParameterRegistry(model, named, self._abort_all)
        self._parameters = self.registry.parameters
        codec = codec_for(settings.compression)
        buffers = list(model.named_buffers()) if model is not None and init_sync else []
        agree_on_parameters([*named, *buffers], comm, settings.described(codec), hooked=True)
        if init_sync:
            share([*named, *buffers], comm, model=model, hint=INIT_SYNC)
        self.boundaries: StepBoundaries = boundaries_of(comm)
        self.comms: AveragerComms = AveragerComms(comm, deterministic=settings.deterministic)
        spread = sparse_parameters(model) if model is not None else set()
        self._spread = {i for i, p in enumerate(self._parameters) if id(p) in spread}
        # Indices of the parameters whose gradients are averaged as sparse rows, outside the buckets.
        self._sparse: list[int] = []
        self._hooks = CallerHooks(self._parameters, self._spread)
        self.buckets: Buckets = Buckets(named, comm, self.comms, codec, settings.sizes)
        self._watch = PassWatch("GradientAverager", self.comms)
        self._tracker = BackwardTracker(self, self._parameters, self._watch)
        # Indices of the parameters whose gradients were accumulated in no_sync and have not been averaged yet.
        self._accumulated: set[int] = set()
        # If buckets are sent during the backward pass, the first step records the order in which gradients arrive.
        self._seen: list[int] | None = [] if self.buckets.background else None
        self._frozen = [i for i, p in enumerate(self._parameters) if not p.requires_grad]
        self._saved: SavedGradients | None = None
        try:
            if comm.size > 1:
                self._install()
            # Call `ready` last, so that all ranks have completed the operations above before a failed pass on one rank
            # can abort the communicators.
            self.comms.ready()
        except BaseException:
            # Without `remove`, the hooks would keep the averager alive, and no other averager could use its parameters.
            self.remove()
            raise
        self._reduction = Reduction(self.buckets, weights)
        weights.attach(self.comms.control)
        weights.forget()

    def _install(self) -> None:
        self.registry.watch_gradients(self._tracker.arrive)
        # Watch the outputs, to detect a backward pass that fails before it reaches a parameter or that reaches no
        # parameter.
        # If ranks may lack gradients, a rank takes part in averaging even if its backward pass reaches no parameter.
        find_unused = self._settings.find_unused
        reached = self._on_output_gradient if find_unused else self._tracker.follow
        self.registry.watch_forward(partial(watch_outputs, arrived=reached), traced=find_unused)
        # Add the last parameters first, because gradients arrive roughly in this order.
        self._add_parameters([i for i, p in reversed(list(enumerate(self._parameters))) if p.requires_grad])

    def remove(self) -> None:
        """Remove the hooks, and release the communicators. Raises `RuntimeError` during a backward pass."""
        if self._tracker.is_open:
            raise RuntimeError("remove() was called inside a backward pass; call it after backward()")
        self.registry.remove()
        self._tracker.forget()
        self._watch.remove()
        self.buckets.clear()
        self._hooks.clear()
        self.comms.close()

    def _abort_all(self, problem: str) -> None:
        """Notify all ranks of a problem with the parameters. A method, because `registry` is older than `comms`."""
        self.comms.abort_all(problem)

    def _change(self, event: str) -> None:
        """Move to the phase that an event leads to; only this method changes the phase."""
        self.phase = TRANSITIONS[event][self.phase]

    # -- hooks ----------------------------------------------------------------------------------
    def _add_parameters(self, indices: Sequence[int]) -> None:
        """Start averaging the gradients of these parameters."""
        self.buckets.add([i for i in indices if i not in self._spread])
        self._sparse += [i for i in indices if i in self._spread]
        self._hook_chunks()

    def _hook_chunks(self) -> None:
        """Register hooks that copy a chunk's gradients once it is complete; the last chunk is copied after the pass."""
        self._hooks.clear()
        chunks = [(number, slots) for number, bucket in enumerate(self.buckets.ordered) for slots in bucket.chunks]
        for number, slots in chunks[:-1]:
            bucket = self.buckets.ordered[number]
            # Skip frozen parameters, because torch rejects hooks on them.
            trained = [slot for slot in slots if bucket.parameters[slot].requires_grad]
            free = [slot for slot in trained if bucket.indices[slot] not in self._hooks.stays]
            if free:
                self._hooks.add(bucket.indices[free[-1]], self._on_chunk_ready, number, free)
        trained = [i for i, p in enumerate(self._parameters) if p.requires_grad]
        for index in trained:
            self._hooks.watch(index)
            if self._seen is not None and index in self.buckets.where:
                self._hooks.add(index, self._see, index)

    def _see(self, index: int, _parameter: torch.Tensor) -> None:
        if self._seen is not None:
            self._seen.append(index)

    def _on_chunk_ready(self, number: int, slots: Sequence[int], _parameter: torch.Tensor) -> None:
        """Hook on the last parameter of a chunk; runs after its gradient has been added to `p.grad`."""
        contents = self._reduction.contents[number]
        saved = self._saved
        # Outside a backward pass, p.grad belongs to the caller. This hook may still run: for example, one thread's
        # backward() may have made the model's pass fail while another thread's backward() continues.
        if saved is None or not self.syncing or contents.started:
            return
        if saved.staying:
            # Skip slots whose p.grad is still the tensor from before the pass: the pass has not added a gradient yet.
            bucket = contents.bucket
            slots = [i for i in slots if bucket.parameters[i].grad is not saved.staying.get(bucket.indices[i])]
        contents.take(slots)
        if self.phase is Phase.OPEN:
            try:
                self._reduction.advance(saved)
            except AbortedError:
                self._change("hold")

    def _on_output_gradient(self, gradient: torch.Tensor) -> None:
        """Hook: a backward pass has reached an output of the model."""
        if self.registry.hooked and adds_to_leaves(self.registry.ids):
            self._tracker.enter(current_pass())

    # -- a pass ---------------------------------------------------------------------------------
    def begin(self) -> None:
        """Set p.grad aside, and prepare for the pass's gradients. Collective after a failed pass."""
        failed = self.phase is not Phase.IDLE
        if failed:
            # Call `settle` before reusing the buckets: reductions of the failed pass may write to the buckets until the
            # reductions are aborted.
            self.comms.settle()
            self._reduction.give_up()
        # After a failed pass, buckets in the aborted communicator's memory would be reduced more slowly. Replace the
        # buckets only now, because they stored the last step's p.grad until the optimizer had used it.
        stale = self.buckets.comm is not self.comms.data
        if stale:
            self.buckets.recreate(list(self.buckets.where))
        if failed or stale:
            self._reduction = Reduction(self.buckets, self._weights, keeps_copies=self.phase is Phase.UNSENT)
        # A hook that the caller has added must run before the averager's hooks, so register the averager's hooks again.
        if self._hooks.begin() or stale:
            self._hook_chunks()
        held: list[tuple[int, torch.Tensor]] = []
        for index, parameter in enumerate(self._parameters):
            if (grad := parameter.grad) is not None:
                held.append((index, grad))
        within = self.buckets.within(held) if held else set()
        self._saved = SavedGradients(self._parameters, held, within, self._hooks.stays)
        # With several models, send nothing before the end of the pass, where all ranks use the same order of models. If
        # a rank failed while a later model's bucket was already in flight, other ranks would repeat the pass, or wait
        # for it to be repeated, although an earlier model had already finished its pass.
        early = len(self._watch.peers) == 1
        # Change the phase last: if anything above raises, the pass has not begun.
        self._change("begin" if early and self.buckets.background else "begin held")

    @torch.no_grad()
    def end(self) -> None:
        """Complete the gradients of a pass, and check which gradients arrived. Collective except in `no_sync`."""
        saved = self._saved
        assert saved is not None
        self.registry.check()
        arrived = saved.arrived()
        taken = self._reduction.taken()
        # Leave out parameters that were frozen after their forward pass: torch adds no gradients to them.
        unchanged = self._tracker.arrived - arrived - taken
        if unchanged:
            unchanged = {i for i in unchanged if self._parameters[i].requires_grad}
        problem = None
        if unchanged or self._hooks.count:
            used = self._hooks.used([i for i in unchanged if self._parameters[i].grad is None])
            problem = used_gradients([self.registry.names[i] for i in used]) if used else None
        arrived |= taken.union(unchanged)
        # A nested backward pass may have run in no_sync(), but the outermost pass decides whether to average.
        if self.syncing:
            self._average(saved, arrived, problem)
        elif problem:
            raise RuntimeError(problem)
        else:
            self._weights.keep()
            self._accumulated |= arrived
            saved.merge()
            self._saved = None
        self._change("finish")

    def _average(self, saved: SavedGradients, arrived: set[int], problem: str | None) -> None:
        """Average the gradients of a pass, and the gradients accumulated before it. Collective."""
        reduction = self._reduction
        if self._accumulated:
            arrived |= {i for i in self._accumulated if self._parameters[i].requires_grad}
        thawed = [i for i in self._frozen if self._parameters[i].requires_grad] if self._frozen else []
        self._change("reduce")
        while True:
            try:
                # If a hook has used a gradient before it was averaged, only this rank knows, so send a request that
                # makes all ranks raise an error together.
                reduction.reduce_all(saved, arrived, requests=(bool(thawed), bool(problem)))
                break
            except AbortedError as aborted:
                # No mean has been used yet, so the reduction can be repeated with the failed rank's next pass.
                if not reduction.can_rewind():
                    raise
                reduction.rewind()
                self._reconnect(aborted)
        self._change("average")
        reduction.conclude()
        asks_thawed, asks_used = reduction.asked
        # Requests are sent in a bucket's header. If there are no buckets, look at this rank's own requests.
        if asks_used or (problem and not self.buckets.where):
            self._refuse_used(problem)
        if reduction.uneven and not self._settings.find_unused:
            self._look_at(0)
        if asks_thawed or (thawed and not self.buckets.where):
            self._on_unfrozen(saved, thawed, arrived)
        averaged = self._average_sparse(arrived) if self._sparse else set()
        if self._settings.sync_buffers and self.registry.model is not None:
            share_buffers(self.registry.model, self.comms.control, self._weights.source)
        if self._weights.here:
            reduction.assign(saved)
        else:
            saved.restore()
        self._end_step(averaged)

    def _reconnect(self, aborted: AbortedError) -> None:
        """Replace the communicators after a failed pass has aborted them. Collective."""
        try:
            self.comms.replace()
        except AbortedError as error:
            # The communicators can't be replaced. Raise the data communicator's own error, which contains the cause.
            raise aborted from error
        self._weights.attach(self.comms.control)

    def _end_step(self, averaged: Set[int]) -> None:
        """Prepare for the next step.

        Args:
            averaged: Indices of the parameters whose sparse gradients were averaged.
        """
        # Clear `_saved` first: p.grad contains the means now, and an error below must not restore the old gradients.
        self._saved = None
        if self._accumulated:
            # Remember frozen parameters: gradients accumulated before a parameter was frozen are averaged once it is
            # unfrozen.
            waiting = {i for i in self._accumulated if not self._parameters[i].requires_grad}
            self._accumulated = {i for i in waiting - averaged if not self._reduction.has_mean(i)}
        self.steps += self._weights.here
        all_took_part = self._weights.active == self.comms.size
        if self._weights.uneven:
            self._weights.forget()
        elif not self._settings.total:
            engine = self._engine()
            if engine is not None and engine.uneven_batches:
                warn_of_uneven_batches(engine)
        if self._seen is not None and all_took_part:
            self._learn_order(self._seen)
        # Create the reduction last, because learning the order replaces the buckets.
        self._reduction = Reduction(self.buckets, self._weights)

    def _learn_order(self, seen: Sequence[int]) -> None:
        """Recreate the buckets, in the order in which rank 0's gradients arrived."""
        self._seen = None
        self.buckets.rearrange(self.comms.control.broadcast_object(list(dict.fromkeys(seen))))
        self._hook_chunks()

    def fail(self) -> None:
        """Undo a backward pass that raised: restore p.grad, and abort the pass on ranks that received part of it."""
        if self._saved is not None:
            self._saved.restore()
            self._saved = None
        # Don't report a failure twice, or in phase AVERAGED, in which the other ranks already have the means.
        spreads = self._reduction.sent and self.phase not in (Phase.AVERAGED, Phase.FAILED)
        self._change("fail" if self._reduction.sent else "fail unsent")
        if spreads:
            self.comms.abort_pass(
                "its backward pass failed after some gradients were averaged, so all ranks drop that pass and "
                "p.grad is unchanged. Continue with the next pass, or repeat this pass on all ranks",
                self._reduction.contents[0].work,
            )

    def shadow(self) -> None:
        """Take part in a step of ranks that still have data, without contributing or changing p.grad. Collective."""
        self._accumulated.clear()
        self._watch.start()
        try:
            self.begin()
            self.end()
        except BaseException:
            self.fail()
            raise
        finally:
            self._watch.stop()

    # -- the end of a step ----------------------------------------------------------------------
    def _average_sparse(self, arrived: set[int]) -> set[int]:
        """Average the sparse gradients, and return the indices of the averaged parameters. Collective."""
        # Look at p.grad, too, because the caller may have set accumulated gradients to None.
        has = {i for i in self._sparse if i in arrived and self._parameters[i].grad is not None}
        absent = [self.registry.names[i] for i in self._sparse if i not in has and self._weights.here]
        sparse = [self.registry.named[i] for i in self._sparse]
        here = [i in has and self._weights.here for i in self._sparse]
        lacking = None if self._settings.find_unused else absent
        averaged = average_sparse(sparse, self.comms.control, self._weights, here, lacking)
        return {self._sparse[place] for place in averaged}

    def _refuse_used(self, problem: str | None) -> None:
        """Raise on all ranks, because a rank's hooks used gradients before they were averaged. Collective."""
        by_rank = self.comms.control.all_gather_object(problem)
        if problem is not None:
            raise RuntimeError(problem)
        rank, problem = next((rank, text) for rank, text in enumerate(by_rank) if text is not None)
        raise AbortedError(
            f"rank {rank} has failed in its backward pass, so all ranks drop that pass: {problem}",
            rank=self.comms.rank,
            size=self.comms.size,
            peer=rank,
        )

    def _look_at(self, first: int) -> None:
        """Raise `MismatchError` if only some ranks have a parameter's gradient, in bucket `first` or later."""
        looked = self._reduction.contents[first:]
        # Decide from flags that are equal on all ranks, so that either all ranks gather or none does.
        if not any(had and lacked for contents in looked for had, lacked in contents.found):
            return
        lacking = [
            self.registry.names[i]
            for contents in looked
            for i, arrived in zip(contents.bucket.indices, contents.arrived, strict=True)
            if not arrived
        ]
        by_rank = self.comms.control.all_gather_object(lacking if self._weights.here else [])
        check_skipped(self.registry.names, by_rank, self._weights.active, self.comms.control)

    def _on_unfrozen(self, saved: SavedGradients, thawed: list[int], arrived: set[int]) -> None:
        """Average the gradients of parameters that have been unfrozen, in this step and all later ones."""
        names = [self.registry.names[i] for i in thawed]
        with ErrorContext(f"comparing frozen parameters; no longer frozen on rank {self.comms.rank}: {names}"):
            agree_on_parameters(self.registry.named, self.comms.control)
        self._frozen = [i for i in self._frozen if i not in thawed]
        known = len(self.buckets.ordered)
        self._add_parameters(thawed)
        self._reduction.extend()
        # Don't repeat this reduction if another rank fails: that rank may already have used means from the other
        # buckets.
        self._reduction.reduce_all(saved, arrived, known)
        self._reduction.conclude(known)
        if self._reduction.uneven and not self._settings.find_unused:
            self._look_at(known)
