"""Averages a model's gradients over the ranks of one communicator: the hooks, and the phases of a pass."""

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
from unisono.utils.flatten import bucket_sizes
from unisono.utils.parameters import INIT_SYNC, Named, agree_on_parameters, share, share_buffers
from unisono.utils.pass_watch import PassWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from unisono.compression.codec import Codec
    from unisono.core.step_boundaries import StepBoundaries

__all__ = ["TRANSITIONS", "AveragerSettings", "Averaging", "Phase"]


class Phase(Enum):
    """Where an averager is in a backward pass."""

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
"""Next phase by event and phase; see `Averaging`."""


@dataclass(frozen=True, slots=True)
class AveragerSettings:
    """Arguments of a `GradientAverager`, the same on all ranks.

    Attributes:
        sizes: Maximum bytes in a bucket, and in the first one; None for defaults.
        compression: As passed.
        total: Whether gradients are summed.
        find_unused: Whether ranks may lack a gradient that others have.
        sync_buffers: Whether to broadcast rank 0's buffers after each pass.
        deterministic: Whether gradients are summed in a fixed order.
    """

    sizes: tuple[int | None, int | None]
    compression: str | Codec | Callable[[], Codec] | None
    total: bool
    find_unused: bool
    sync_buffers: bool
    deterministic: bool

    def described(self, codec: Codec | None) -> dict[str, Any]:
        """Return the values that ranks compare."""
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

    begin: The first gradient of the outermost call of autograd is about to be added. begin held: Likewise, if the
    calling thread would have to reduce, or passes of other models are open. hold: A full bucket could not be sent,
    because another rank's pass has failed. The pass decides at its end what to do: if this pass fails first, there is
    nothing to repeat. reduce: The outermost call has succeeded outside `no_sync`. If another rank fails in this phase,
    the reduction is repeated with that rank's next pass, provided that this rank still has everything it sent. average:
    All buckets are reduced. Late gradients are added, and errors that all ranks see are raised now. finish: The pass
    has ended, and p.grad is ready for the caller. In `no_sync`, nothing was reduced. fail: The pass has raised after
    sending a bucket. Before AVERAGED, all ranks drop the pass. fail unsent: The pass has raised before sending
    anything. Other ranks may be in their pass, and abort it later, so this rank's next attempt keeps copies of what it
    sends. An autograd call that never reaches a parameter causes this event in IDLE.

    Two objects hold shorter-lived state: `SavedGradients` for one pass, and `Reduction` for one step. Passes in
    `no_sync` belong to the step of the next pass outside.

    Args:
        model: The module; None for parameters without one.
        named: All parameters, with their names.
        comm: The ranks that average. Collective.
        settings: Arguments of the averager.
        weights: Weights of the steps.
        init_sync: Whether to broadcast rank 0's parameters and buffers now.
        owner: The averager.

    Attributes:
        phase: Phase of the backward pass.
        steps: Number of steps made.
        syncing: Whether passes average; False in `no_sync`.
        registry, comms, buckets: Its components.
        boundaries: Step boundaries of `comm`.
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
        # Hooks keep this object, and so the averager, alive: the caller needs no reference to it.
        self._owner = owner
        self.phase: Phase = Phase.IDLE
        self.steps: int = 0
        self.syncing = True
        self._model = model
        self._named = named
        self._names = [name for name, _ in named]
        self._parameters = [p for _, p in named]
        self._settings = settings
        self._weights = weights
        # Weak, so that a communicator that the program drops can leave its group.
        self._origin = ref(comm)
        # First, because it rejects a model that already has an averager, perhaps on this rank alone, before anything is
        # sent.
        self.registry: ParameterRegistry = ParameterRegistry(model, named)
        codec = codec_for(settings.compression)
        buffers = list(model.named_buffers()) if model is not None and init_sync else []
        agree_on_parameters([*named, *buffers], comm, settings.described(codec), hooked=True)
        if init_sync:
            share([*named, *buffers], comm, model=model, hint=INIT_SYNC)
        self.boundaries: StepBoundaries = boundaries_of(comm)
        self.comms: AveragerComms = AveragerComms(comm, deterministic=settings.deterministic)
        data = self.comms.data
        background = data.overlaps and codec is None
        sizes = bucket_sizes(
            settings.sizes, self._parameters, comm, background=background, compressed=codec is not None
        )
        spread = sparse_parameters(model) if model is not None else set()
        self._spread = {i for i, p in enumerate(self._parameters) if id(p) in spread}
        # Indices of the parameters whose gradients are averaged as sparse rows, outside the buckets.
        self._sparse: list[int] = []
        self._hooks = CallerHooks(self._parameters, self._spread)
        self.buckets: Buckets = Buckets(named, self.comms, codec, sizes)
        self._watch = PassWatch("GradientAverager", self.comms)
        self._tracker = BackwardTracker(self, self._parameters, self._watch)
        # Gradients that passes in no_sync have accumulated, and that no pass has averaged yet.
        self._accumulated: set[int] = set()
        # If buckets are sent while others fill, the first step records the order in which gradients arrive.
        self._seen: list[torch.Tensor] | None = [] if self.buckets.background else None
        self._frozen = [i for i, p in enumerate(self._parameters) if not p.requires_grad]
        self._saved: SavedGradients | None = None
        try:
            if comm.size > 1:
                self._install()
            # Last, once the hooks exist: from here on, a failed pass aborts the communicator.
            self.comms.ready()
        except BaseException:
            # Otherwise its hooks would keep the averager alive and its parameters claimed.
            self.remove()
            raise
        self._reduction = self._new_reduction()
        weights.attach(self.comms.control)
        weights.forget()

    def _install(self) -> None:
        self.registry.watch_gradients(self._tracker.arrive)
        # Watching the output detects a pass that fails before it reaches a parameter, or that reaches none.
        self.registry.watch_forward(self.check, self._watch_outputs, traced=self._settings.find_unused)
        # Gradients arrive roughly in reverse order of the parameters.
        self._add_parameters([i for i, p in reversed(list(enumerate(self._parameters))) if p.requires_grad])

    def remove(self) -> None:
        """Remove the hooks, and release the communicators. Raises `RuntimeError` in a pass."""
        if self._tracker.is_open:
            raise RuntimeError("remove() was called inside a backward pass; call it after backward()")
        self.registry.remove()
        self._tracker.forget()
        self._watch.remove()
        self.buckets.clear()
        self._hooks.clear()
        self.comms.close()

    def check(self) -> None:
        """Raise on all ranks if a parameter was replaced, swapped, added or converted here."""
        problem = self.registry.problem()
        if problem is not None:
            self.comms.abort_all(problem)
            raise RuntimeError(problem)

    def _change(self, event: str) -> None:
        """Move to the phase that an event leads to; only this method changes the phase."""
        self.phase = TRANSITIONS[event][self.phase]

    def _new_reduction(self) -> Reduction:
        keeps_copies = self.phase is Phase.UNSENT
        return Reduction(self.buckets, self.comms, self._weights, keeps_copies=keeps_copies)

    # -- hooks ----------------------------------------------------------------------------------
    def _add_parameters(self, indices: Sequence[int]) -> None:
        """Average these parameters as well from now on."""
        self.buckets.add([i for i in indices if i not in self._spread])
        self._sparse += [i for i in indices if i in self._spread]
        self._hook_chunks()

    def _hook_chunks(self) -> None:
        """Copy gradients in when a chunk is complete; those of the last chunk are copied at the end of the pass."""
        self._hooks.clear()
        chunks = [(number, slots) for number, bucket in enumerate(self.buckets.ordered) for slots in bucket.chunks]
        for number, slots in chunks[:-1]:
            bucket = self.buckets.ordered[number]
            # Torch accepts no hook on a frozen parameter.
            trained = [slot for slot in slots if bucket.parameters[slot].requires_grad]
            free = [slot for slot in trained if bucket.indices[slot] not in self._hooks.stays]
            if free:
                self._hooks.add(bucket.indices[free[-1]], partial(self._on_chunk_ready, number, free))
        trained = [i for i, p in enumerate(self._parameters) if p.requires_grad]
        for index in trained:
            self._hooks.watch(index)
            if self._seen is not None and index in self.buckets.where:
                self._hooks.add(index, self._seen.append)

    def _on_chunk_ready(self, number: int, slots: Sequence[int], _parameter: torch.Tensor) -> None:
        """Hook on the last parameter of a chunk: its gradient has been added to `p.grad`."""
        contents = self._reduction.contents[number]
        saved = self._saved
        # Outside a pass (for example, after a pass that two threads ran) p.grad belongs to the caller.
        if saved is None or not self.syncing or contents.started:
            return
        if saved.staying:
            # A gradient with a graph remains in p.grad if the pass does not add to it.
            bucket = contents.bucket
            slots = [i for i in slots if bucket.parameters[i].grad is not saved.staying.get(bucket.indices[i])]
        contents.take(slots)
        if self.phase is Phase.OPEN:
            try:
                self._reduction.advance(saved)
            except AbortedError:
                self._change("hold")

    def _watch_outputs(self, returned: Any) -> None:
        # If ranks may lack gradients, a rank joins the averaging even when its pass reaches no parameter.
        find_unused = self._settings.find_unused
        watch_outputs(returned, self._on_output_gradient if find_unused else self._tracker.follow)

    def _on_output_gradient(self, gradient: torch.Tensor) -> None:
        """Hook: a backward pass has reached an output of the model."""
        if self.registry.hooked and adds_to_leaves(self.registry.ids):
            self._tracker.enter(current_pass())

    # -- a pass ---------------------------------------------------------------------------------
    def begin(self) -> None:
        """Set p.grad aside, and prepare for gradients. Collective after a failed pass."""
        failed = self.phase is not Phase.IDLE
        if failed:
            # Before the memory is reused: reductions of the failed pass may write to it until they are aborted.
            self.comms.settle()
            self._reduction.give_up()
        # After a failed pass, the aborted communicator's memory would be reduced more slowly. It is replaced only now,
        # because it held the last step's p.grad until that was used.
        stale = self.buckets.comm is not self.comms.data
        if stale:
            self.buckets.recreate(list(self.buckets.where))
        if failed or stale:
            self._reduction = self._new_reduction()
        # If the caller has added a hook, it runs after the averager's until these are registered again.
        if self._hooks.begin() or stale:
            self._hook_chunks()
        held = [(i, p.grad) for i, p in enumerate(self._parameters) if p.grad is not None]
        within = self.buckets.within(held) if held else set()
        self._saved = SavedGradients(self._parameters, held, within, self._hooks.stays)
        # With several models, nothing is sent before the end of the pass, where all ranks follow the same order. If a
        # rank failed with a bucket of a later model in flight, other ranks would repeat the pass, or wait for it to be
        # repeated, although an earlier model's pass has already finished.
        early = len(self._watch.peers) == 1
        # Last: if anything above raises, the pass has not begun.
        self._change("begin" if early and self.buckets.background else "begin held")

    @torch.no_grad()
    def end(self) -> None:
        """Complete the gradients of a pass, and check which ones arrived. Collective except in `no_sync`."""
        saved = self._saved
        assert saved is not None
        self.check()
        arrived = saved.arrived()
        taken = self._reduction.taken()
        # Torch adds nothing to a parameter that was frozen after its forward pass.
        unchanged = [i for i in self._tracker.arrived - arrived - taken if self._parameters[i].requires_grad]
        problem = None
        if unchanged or self._hooks.count:
            used = self._hooks.used([i for i in unchanged if self._parameters[i].grad is None])
            problem = used_gradients([self._names[i] for i in used]) if used else None
        arrived |= taken.union(unchanged)
        # An inner pass may have been in no_sync(), but the outermost one counts.
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
        """Average the gradients of a pass, and those accumulated before it. Collective."""
        reduction = self._reduction
        if self._accumulated:
            arrived |= {i for i in self._accumulated if self._parameters[i].requires_grad}
        thawed = [i for i in self._frozen if self._parameters[i].requires_grad] if self._frozen else []
        self._change("reduce")
        while True:
            try:
                # Only this rank knows that a hook took a gradient; a request makes all ranks raise the error together.
                reduction.reduce_all(saved, arrived, requests=(bool(thawed), bool(problem)))
                break
            except AbortedError as aborted:
                # No mean has been used yet, so another rank's failed pass may be repeated.
                if not reduction.can_rewind():
                    raise
                reduction.rewind()
                self._reconnect(aborted)
        self._change("average")
        reduction.conclude()
        asks_thawed, asks_used = reduction.asked
        # Without a bucket there is no message to carry the requests.
        if asks_used or (problem and not self.buckets.where):
            self._refuse_used(problem)
        if reduction.uneven and not self._settings.find_unused:
            self._look_at(0)
        if asks_thawed or (thawed and not self.buckets.where):
            self._on_unfrozen(saved, thawed, arrived)
        averaged = self._average_sparse(arrived) if self._sparse else set()
        if self._settings.sync_buffers and self._model is not None:
            share_buffers(self._model, self.comms.control, self._weights.source)
        if self._weights.here:
            reduction.assign(saved)
        else:
            saved.restore()
        self._end_step(averaged)

    def _reconnect(self, aborted: AbortedError) -> None:
        """Replace communicators that a failed pass has aborted. Collective."""
        try:
            self.comms.replace()
        except AbortedError as error:
            # The data communicator is gone for good, and its own error tells the caller why.
            raise aborted from error
        self._weights.attach(self.comms.control)

    def _end_step(self, averaged: Set[int]) -> None:
        """Prepare for the next step.

        Args:
            averaged: The parameters with sparse gradients that were averaged.
        """
        # First, because p.grad holds the means, which an error below must not discard.
        self._saved = None
        if self._accumulated:
            # Gradients accumulated before a parameter was frozen are averaged once it is unfrozen.
            waiting = {i for i in self._accumulated if not self._parameters[i].requires_grad}
            self._accumulated = {i for i in waiting - averaged if not self._reduction.has_mean(i)}
        self.steps += self._weights.here
        all_took_part = self._weights.active == self.comms.size
        if self._weights.uneven:
            self._weights.forget()
        elif not self._settings.total:
            origin = self._origin()
            if origin is not None and engine_of(origin).uneven_batches:
                warn_of_uneven_batches(origin, total=False)
        if self._seen is not None and all_took_part:
            self._learn_order(self._seen)
        # Last, because learning the order replaces the buckets.
        self._reduction = self._new_reduction()

    def _learn_order(self, seen: Sequence[torch.Tensor]) -> None:
        """Recreate the buckets, in the order in which rank 0's gradients arrived."""
        self._seen = None
        numbers = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        order = list(dict.fromkeys(numbers[id(parameter)] for parameter in seen))
        self.buckets.rearrange(self.comms.control.broadcast_object(order))
        self._hook_chunks()

    def fail(self) -> None:
        """Undo a pass that raised: restore p.grad and weights. Makes ranks that have received part of it fail."""
        if self._saved is not None:
            self._saved.restore()
            self._saved = None
        # An earlier failure has been reported already; after AVERAGED, the other ranks have everything they need.
        spreads = self._reduction.sent and self.phase not in (Phase.AVERAGED, Phase.FAILED)
        self._change("fail" if self._reduction.sent else "fail unsent")
        if spreads:
            self.comms.abort_pass(
                "its backward pass failed after some gradients were averaged, so all ranks drop that pass and "
                "p.grad is unchanged. Continue with the next pass, or repeat this pass on all ranks",
                self._reduction.first_work,
            )

    def shadow(self) -> None:
        """Join a step of the ranks that still have data: contribute nothing, and leave p.grad as it is. Collective."""
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
        """Average the sparse gradients, and return the parameters that have one. Collective."""
        # Accumulated gradients may have been set to None since.
        has = {i for i in self._sparse if i in arrived and self._parameters[i].grad is not None}
        absent = [self._names[i] for i in self._sparse if i not in has and self._weights.here]
        sparse = [self._named[i] for i in self._sparse]
        here = [i in has and self._weights.here for i in self._sparse]
        lacking = None if self._settings.find_unused else absent
        averaged = average_sparse(sparse, self.comms.control, self._weights, here, lacking)
        return {self._sparse[place] for place in averaged}

    def _refuse_used(self, problem: str | None) -> None:
        """Raise on all ranks, because hooks removed gradients before they were averaged. Collective."""
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
        """Raise `MismatchError` on all ranks if some lack a gradient, in this bucket or later, that others have."""
        looked = self._reduction.contents[first:]
        # Decide based on flags that all ranks have read, so that either all of them gather or none.
        if not any(had and lacked for contents in looked for had, lacked in contents.found):
            return
        lacking = [
            self._names[i]
            for contents in looked
            for i, arrived in zip(contents.bucket.indices, contents.arrived, strict=True)
            if not arrived
        ]
        by_rank = self.comms.control.all_gather_object(lacking if self._weights.here else [])
        check_skipped(self._names, by_rank, self._weights.active, self.comms.control)

    def _on_unfrozen(self, saved: SavedGradients, thawed: list[int], arrived: set[int]) -> None:
        """Average parameters that were unfrozen: the gradients that they have now, and those of later passes."""
        names = [self._names[i] for i in thawed]
        with ErrorContext(f"comparing frozen parameters; no longer frozen on rank {self.comms.rank}: {names}"):
            agree_on_parameters(self._named, self.comms.control)
        self._frozen = [i for i in self._frozen if i not in thawed]
        known = len(self.buckets.ordered)
        self._add_parameters(thawed)
        self._reduction.extend()
        # Not repeated if another rank fails, because that rank may already have used means from the other buckets.
        self._reduction.reduce_all(saved, arrived, known)
        self._reduction.conclude(known)
        if self._reduction.uneven and not self._settings.find_unused:
            self._look_at(known)
