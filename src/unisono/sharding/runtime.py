"""Units of a sharded model, and the hooks that gather them, reduce their gradients and free them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch.utils._pytree import tree_leaves

from unisono.core.garbage import weak_method
from unisono.errors import MismatchError
from unisono.sharding.comms import NotCopied, ShardComms
from unisono.sharding.flat_parameters import FlatParameters, OneStream
from unisono.sharding.partition import UnitPlan
from unisono.sharding.shard_optimizer import ShardOptimizer, check_same_step
from unisono.utils.backward_pass import BackwardTracker, PassOwner, current_pass, watch_outputs
from unisono.utils.parameters import ModelMembers
from unisono.utils.pass_watch import PassWatch

__all__ = ["TRANSITIONS", "ForwardCall", "Place", "Runtime", "StepPhase", "Unit", "make_units"]


class ForwardCall:
    """One forward call of a unit, recorded for its backward pass."""

    inputs = 0
    """Number of inputs that will get a gradient."""
    left = 0
    """Number of inputs whose gradient has not arrived yet."""


class Unit:
    """Parameters that are gathered together, and the running modules that need them.

    Args:
        plan: Name, modules and parameters of the unit.
        flats: The unit's parameters, grouped by dtype, device and `requires_grad`.

    Attributes:
        plan, flats: Name, modules and parameters of the unit.
        trained: The flat parameters that are not frozen.
        gathered: Whether the unit's parameters are usable.
        running: The modules whose forward is running, the innermost one last.
        call: The newest forward call.
        held: Whether the unit's parameters must not be freed, because `full_parameters` shows them.
        open: Forward calls that the current backward pass has reached but not left.
        frees_after_gradients: Whether no parameter is frozen, so that the backward pass can free the parameters once
            their gradients have arrived.
    """

    def __init__(self, plan: UnitPlan, flats: Sequence[FlatParameters]) -> None:
        self.plan = plan
        self.flats = flats
        self.trained: list[FlatParameters] = [flat for flat in flats if not flat.frozen]
        self.gathered: bool = False
        self.running: list[nn.Module] = []
        self.held = False
        self.call: ForwardCall = ForwardCall()
        self.open: set[ForwardCall] = set()
        self.frees_after_gradients: bool = len(self.trained) == len(flats)

    def free(self) -> None:
        """Release the memory of the unit's parameters, unless one of the unit's modules is running."""
        self.open.clear()
        if not self.running and not self.held:
            self.gathered = False
            for flat in self.flats:
                flat.free()

    def check(self) -> None:
        """Raise `RuntimeError` if a parameter was unfrozen since the model was sharded."""
        for flat in self.flats:
            if flat.frozen and any(p.requires_grad for p in flat.parameters):
                name = next(each.name for each, p in zip(flat.pieces, flat.parameters, strict=True) if p.requires_grad)
                raise RuntimeError(
                    f"{name!r} was frozen when its model was sharded. Call remove(), and shard the model again"
                )

    def written(self) -> RuntimeError | None:
        """Return an error if a gathered parameter was modified outside `full_parameters`, otherwise None."""
        for flat in () if self.held else self.flats:
            name = flat.written()
            if name is not None:
                return RuntimeError(
                    f"{name!r} was changed while its sharded model ran, where each rank has a copy of it that "
                    "is not kept. Change it inside `with sharded.full_parameters():`"
                )
        return None

    def is_seen_by(self, returned: Any) -> bool:
        """Return whether a tensor returned by a module is a view of the unit's parameters."""
        found = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, torch.Tensor)]
        return any(flat.is_seen_by(leaf) for leaf in found for flat in self.flats)

    def is_complete(self) -> bool:
        """Return whether each trained parameter has an unreduced gradient from the current pass."""
        return all(
            index in flat.gradient.arrived
            for flat in self.trained
            for index, parameter in enumerate(flat.parameters)
            if parameter.requires_grad
        )


def make_units(
    plans: Sequence[UnitPlan],
    comms: ShardComms,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
) -> list[Unit]:
    """Shard the parameters of each unit.

    Padding makes all message lengths different, so that the communicator's check detects ranks that have reached
    different units.
    """
    lengths: set[int] = set()
    units = []
    for plan in plans:
        kinds: dict[object, list[tuple[str, torch.Tensor]]] = {}
        for name, p in plan.parameters:
            # Frozen parameters get a separate flat tensor, because they have no gradients to reduce.
            kinds.setdefault((p.dtype, p.device, p.requires_grad), []).append((name, p))
        flats = []
        for named in kinds.values():
            padding = _padding((p for _, p in named), comms.size, lengths)
            flats.append(FlatParameters(named, comms, padding, param_dtype=param_dtype, reduce_dtype=reduce_dtype))
        units.append(Unit(plan, flats))
    return units


def _padding(parameters: Iterable[torch.Tensor], size: int, lengths: set[int]) -> int:
    """Return the number of padding elements of a flat tensor, chosen so that no two messages have the same length.

    Args:
        parameters: Parameters in the flat tensor.
        size: Number of ranks.
        lengths: Lengths of the messages so far; the new message's length is added.
    """
    used = sum(p.numel() for p in parameters)
    length = max(1, -(-used // size))
    while length in lengths:
        length += 1
    lengths.add(length)
    return length * size - used


class _GatherOrder:
    """The order in which units are gathered in a step, used in the next step to predict which unit comes next.

    A unit that stays gathered from forward to backward is not gathered in backward, so forward and backward have
    separate orders.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget the recorded order, which is also the initial state.

        Prefetching is collective, and after a failure ranks' orders may differ.
        """
        # For each unit, the unit that was gathered after it. The key is (False, unit) in forward, and (True, unit) in
        # backward.
        self._next: dict[tuple[bool, Unit], Unit] = {}
        self._previous: Unit | None = None
        # The last unit gathered in this forward pass, and the last unit gathered in the previous forward pass.
        self._latest: Unit | None = None
        self.last: Unit | None = None

    def begin_forward(self) -> None:
        self.last = self._latest
        self._latest = None
        self._previous = None

    def begin_backward(self) -> None:
        self._previous = None

    def follow(self, unit: Unit, *, backward: bool) -> Unit | None:
        """Record that a unit is gathered now, and return the unit expected next, if known."""
        if self._previous is not None:
            self._next[backward, self._previous] = unit
        self._previous = unit
        if not backward:
            self._latest = unit
        return self._next.get((backward, unit))


@dataclass(slots=True)
class _Pass:
    """State of one backward pass.

    Attributes:
        syncing: Whether the pass reduces gradients.
        reducing: The unit whose gradients are being reduced.
    """

    syncing: bool
    reducing: Unit | None = None


class StepPhase(Enum):
    """Phase of a sharded model between two steps of its optimizer."""

    STEPPED = "no backward pass has begun since the last step"
    UNSTEPPED = "a backward pass has begun, and its gradients wait for a step"
    STEPPING = "all ranks have agreed to make the step, and this one makes it"


TRANSITIONS: dict[str, dict[StepPhase, StepPhase]] = {
    "begin": {
        StepPhase.STEPPED: StepPhase.UNSTEPPED,
        StepPhase.UNSTEPPED: StepPhase.UNSTEPPED,
        StepPhase.STEPPING: StepPhase.STEPPING,
    },
    "agree": dict.fromkeys(StepPhase, StepPhase.STEPPING),
    "step": dict.fromkeys(StepPhase, StepPhase.STEPPED),
    "fail": {
        StepPhase.STEPPED: StepPhase.STEPPED,
        StepPhase.UNSTEPPED: StepPhase.UNSTEPPED,
        StepPhase.STEPPING: StepPhase.UNSTEPPED,
    },
}
"""For each event, the next phase by current phase; see `Runtime`."""


class Runtime(PassOwner, NotCopied):
    """Schedule of one model: when its units are gathered and freed, and when their gradients are reduced.

    Construction registers the hooks. Every module has hooks, so a module that is called directly also gathers its unit.
    Each module's outputs have a hook that gathers the module's unit before its backward pass. A copy of the model is
    refused here, because `copy.deepcopy` also copies the hooks, which refer to this object.

    Phases between two steps of the optimizer:

    =========  =========  ========  =======  =========
    phase      begin      agree     step     fail
    =========  =========  ========  =======  =========
    STEPPED    UNSTEPPED  STEPPING  STEPPED  STEPPED
    UNSTEPPED  UNSTEPPED  STEPPING  STEPPED  UNSTEPPED
    STEPPING   STEPPING   STEPPING  STEPPED  UNSTEPPED
    =========  =========  ========  =======  =========

    begin: A backward pass begins. In STEPPING, the optimizer's closure runs the pass. agree: All ranks have compared
    their gradients and options before an optimizer's step. step: The step has ended, or the caller has dropped the
    gradients. fail: An optimizer's step has raised. In STEPPING, other ranks may have finished their step, so
    the step and all later steps are aborted on all ranks.

    Args:
        units: All units.
        comms: The model's dedicated communicators.
        members: The model, with its parameters.

    Attributes:
        sync: Whether backward passes reduce their gradients.
        phase: Phase between two steps.
    """

    gathers = True

    def __init__(self, units: Sequence[Unit], comms: ShardComms, members: ModelMembers) -> None:
        self._units = units
        self._members = members
        self._flats = [flat for unit in units for flat in unit.flats]
        self._trained = [flat for unit in units for flat in unit.trained]
        self._comms = comms
        self.sync = True
        self._stream = OneStream(flat.part.device for flat in self._flats)
        self._watch = PassWatch("ShardedModel", comms)
        self._pass = BackwardTracker(self, [p for flat in self._flats for p in flat.parameters], self._watch)
        self._handles: list[Any] = []
        self._version = 0  # Incremented when parameters change.
        # Number of running modules, and the exception that was being handled when the outermost module began.
        self._depth = 0
        self._outer: BaseException | None = None
        self.phase: StepPhase = StepPhase.STEPPED
        self._order = _GatherOrder()
        # The current backward pass, if any.
        self._running: _Pass | None = None
        # The modules' hooks keep this object alive.
        arrive = weak_method(self._arrive)
        for place, unit in enumerate(self._units):
            for module in unit.plan.modules:
                # Use `prepend`, because a user's hook may read the parameters, and `always_call`, because a forward
                # that raises must also free its unit.
                self._handles += [
                    module.register_forward_pre_hook(partial(self._enter, unit), prepend=True, with_kwargs=True),
                    module.register_forward_hook(partial(self._leave, unit), always_call=True),
                ]
            # Skip frozen parameters, because torch rejects post-accumulate-grad hooks on them.
            for number, flat in enumerate(unit.trained):
                for index, parameter in enumerate(flat.parameters):
                    hook = partial(arrive, place, number, index)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _change(self, event: str) -> None:
        """Move to the phase that an event leads to; only this method changes the phase."""
        self.phase = TRANSITIONS[event][self.phase]

    # -- hooks ----------------------------------------------------------------------------------
    def _enter(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
        if eval_frame.get_eval_frame_callback() is not None:
            raise RuntimeError("torch.compile cannot trace a ShardedModel's hooks. Compile functions inside modules")
        backward = self._in_backward()
        if self._depth == 0 and not backward:
            self._begin_forward()
        outermost = not unit.running
        unit.running.append(module)
        self._depth += 1
        unit.check()
        self._need(unit, backward=backward)
        if outermost:
            unit.call = ForwardCall()
            # A frozen parameter gets no gradient, so only the gradients of the unit's inputs show that the backward
            # pass has left the unit.
            if torch.is_grad_enabled() and not unit.frees_after_gradients:
                unit.call.inputs = watch_outputs((args, kwargs), partial(self._leave_backward, unit, unit.call))

    def _leave(self, unit: Unit, module: nn.Module, _given: Any, returned: Any) -> None:
        # Do nothing if `_enter` has not run, because another hook raised before it.
        if not unit.running or unit.running[-1] is not module:
            return
        unit.running.pop()
        self._depth -= 1
        # The caller may run the forward in an `except` block, whose exception is not a failure of this forward. Look
        # for writes before `free`, which changes the version counters.
        raised = sys.exception() if sys.exception() is not self._outer else None
        written = unit.written() if raised is None and not unit.running else None
        watched = 0
        if torch.is_grad_enabled():
            watched = watch_outputs(returned, partial(self._reach, unit, unit.call, self._version))
        # Keep the unit if a backward pass is repeating this forward (checkpointing), because the gradients computed
        # next need the unit.
        if not self._in_backward():
            if self._depth == 0:
                self._watch.stop()
            # Two units stay gathered for the backward pass: the model's own unit, which is used throughout, and the
            # last unit of the forward, with which the backward pass begins. Without a hook on an output, a unit that
            # stayed gathered would not be freed until the next forward.
            stays = watched and (unit.plan.name == "" or unit is self._order.last)
            if not unit.running and not stays and not unit.is_seen_by(returned):
                unit.free()
            # Abort only when the outermost module ends, because a module may catch an error of its submodule.
            if self._depth == 0 and (error := raised or written) is not None:
                self.free()
                self._watch.raised()
                self._comms.abort(f"a forward of the sharded model has failed there: {error!r}")
        if written is not None:
            raise written

    def _reach(self, unit: Unit, call: ForwardCall, version: int, _gradient: torch.Tensor) -> None:
        """Gather a unit whose output a backward pass has reached."""
        self._pass.enter(current_pass())
        if version != self._version:
            raise self._pass.failed(
                RuntimeError(
                    f"parameters were changed between the forward and the backward of unit {unit.plan.name!r} of a "
                    "sharded model. Call backward() before optimizer.step()"
                )
            )
        if call not in unit.open:
            unit.open.add(call)
            call.left = call.inputs
        self._need(unit, backward=True)

    def _leave_backward(self, unit: Unit, call: ForwardCall, _gradient: torch.Tensor) -> None:
        """Free a unit with frozen parameters once all inputs of its calls have their gradients."""
        call.left -= 1
        if call.left == 0:
            unit.open.discard(call)
            if not unit.open:
                unit.free()

    def _arrive(self, place: int, number: int, index: int, parameter: torch.Tensor) -> None:
        """Move the gradient that was added to p.grad to the unit's flat gradient."""
        unit = self._units[place]
        flat = unit.trained[number]
        self._pass.enter(current_pass())
        grad = parameter.grad
        # Clear p.grad now, because a freed parameter refuses access to it.
        parameter.grad = None
        assert grad is not None
        if grad.layout != torch.strided:
            raise self._pass.failed(
                RuntimeError(f"{flat.pieces[index].name!r} has a sparse gradient, which has no parts. Use sparse=False")
            )
        with torch.no_grad():
            flat.gradient.take(index, grad)
        running = self._running
        if running is not None and running.syncing and unit.is_complete():
            # Free the unit before the reduction, which needs memory of the same size.
            if unit.frees_after_gradients:
                unit.free()
            self._reduce(running, unit)

    # -- schedule -------------------------------------------------------------------------------
    def _in_backward(self) -> bool:
        return self._pass.is_open or current_pass() >= 0

    def _begin_forward(self) -> None:
        self._outer = sys.exception()
        problem = self._members.problem()
        if problem is not None:
            self._comms.abort(problem)
            raise RuntimeError(f"{problem}. Call remove(), and shard the changed model")
        self._stream.begin()
        # Start watching before `_recover`, which is collective and may be part of a deadlock between models.
        self._watch.start()
        try:
            self._recover()
        except BaseException:
            # Stop watching here. Normally `_leave` does so, but it ignores a forward pass that has not begun.
            self._watch.stop()
            self._watch.raised()
            raise
        # Free units that an earlier forward pass kept gathered, because parameters may have changed since then.
        self.free()
        self._order.begin_forward()

    def _recover(self) -> None:
        """After a failed pass, create new communicators and drop the step's gradients. Collective if a pass has failed.

        Raises:
            CommError: Another rank's pass has failed, and this rank has lost gradients. The next call of `_recover`
                creates new communicators.
        """
        error = self._comms.live.data.exception()
        if error is None:
            return
        # Ranks were at different units when the pass failed, so forget the order. Some may lack gradients of a pass
        # that ended on other ranks, so drop all gradients.
        self._order.forget()
        lost = self._drop()
        for piece in (piece for flat in self._flats for piece in flat.pieces):
            lost = lost or piece.tensor.grad is not None
            piece.tensor.grad = None
        if lost and self.phase is not StepPhase.STEPPED and not self._comms.live.reported:
            # On a mesh, another rank may be waiting for this rank in a group in which no rank has failed, so abort all
            # groups.
            self._comms.abort(f"{type(error).__name__}: {error}")
            raise error
        self._comms.replace()

    def _need(self, unit: Unit, *, backward: bool) -> None:
        """Gather a unit. If gathers overlap with computation, also start gathering the unit expected next."""
        self._stream.check()
        if unit.gathered:
            return
        following = self._order.follow(unit, backward=backward)
        overlaps = self._comms.live.data.overlaps
        if not overlaps:
            following = None
        with torch.no_grad():
            # Start this unit's gathers first: the computation waits for them, and all gathers run in the order in which
            # they are called.
            for flat in (*unit.flats, *(following.flats if following is not None else ())):
                flat.start_gather(async_op=overlaps)
            for flat in unit.flats:
                flat.finish_gather()
        unit.gathered = True

    def _reduce(self, running: _Pass, unit: Unit) -> None:
        """Start averaging a unit's gradients, once the previous reduction is complete."""
        with torch.no_grad():
            # Finish the previous unit's reduction first, because the unsharded gradients of all units would otherwise
            # stay in memory until the end of the pass.
            for flat in running.reducing.trained if running.reducing is not None else ():
                flat.gradient.finish_reduce()
            for flat in unit.trained:
                if flat.gradient.taken:
                    flat.gradient.start_reduce()
            running.reducing = unit

    # -- backward pass --------------------------------------------------------------------------
    def begin(self) -> None:
        """Begin a backward pass."""
        self._change("begin")
        # Read `sync` now, because a hook that enters `no_sync` during this pass must not change the pass's value.
        self._running = _Pass(self.sync)
        self._order.begin_backward()
        for flat in self._trained:
            flat.gradient.arrived.clear()

    def end(self) -> None:
        """Average the gradients of the pass, and free all units. Collective except in `no_sync`."""
        running = self._running
        assert running is not None
        if running.syncing:
            for unit in self._units:
                if (error := unit.written()) is not None:
                    raise error
            # Compare before reducing: a rank that lacks all gradients of a unit skips the unit's reduction, so ranks
            # would make different calls.
            if self._trained:
                self._check_same_gradients()
            for unit in self._units:
                self._reduce(running, unit)
            # Commit only after all reductions have started: a commit waits, and other ranks may still be in an earlier
            # reduction.
            for flat in self._trained:
                flat.gradient.commit(flat.pieces)
        self._running = None
        self.free()

    def fail(self) -> None:
        """Drop all gradients not yet added to the pieces' `.grad`, and abort the step on all ranks."""
        # `running` is None if this rank's pass has reached only other models. On other ranks, the pass may have reached
        # this model.
        running = self._running
        self._running = None
        quoted = f": {self._pass.cause}" if self._pass.cause else ""
        # Abort before `_drop`, which waits for reductions that the other ranks may never join.
        self._comms.abort(f"a backward of the sharded model has failed there{quoted}")
        if self._drop() and not (self.sync if running is None else running.syncing):
            warnings.warn("backward() has raised inside no_sync(): gradients of earlier passes are lost", stacklevel=2)
        self.free()

    def _drop(self) -> bool:
        """Drop all gradients not yet added to the pieces' `.grad`; return whether any of them was unreduced."""
        had = any(flat.gradient.taken for flat in self._trained)
        for flat in self._trained:
            flat.gradient.drop()
        return had

    def _check_same_gradients(self) -> None:
        """Raise `MismatchError` on every rank if ranks have gradients for different parameters. Collective."""
        known = [
            (piece.name, index in flat.gradient.taken or index in flat.gradient.reduced)
            for flat in self._trained
            for index, piece in enumerate(flat.pieces)
        ]
        here = torch.tensor([there for _, there in known], dtype=torch.uint8, device=self._flats[0].part.device)
        both = torch.cat([here, 1 - here])
        self._comms.live.data.all_reduce(both, "max")
        differs = (both[: len(known)] & both[len(known) :]).tolist()
        if 1 in differs:
            raise MismatchError(
                f"only some ranks have a gradient of {known[differs.index(1)][0]!r}. All ranks must use the same "
                "parameters in a step of a sharded model",
                rank=self._comms.live.data.rank,
                size=self._comms.live.data.size,
            )

    # -- from step to step ----------------------------------------------------------------------
    def check_reduced(self, action: str, places: Iterable[Place]) -> None:
        """Raise `RuntimeError` if a forward or backward is running, or a given parameter's gradient is not averaged."""
        self.check_idle(action)
        for flat, index in places:
            if index in flat.gradient.taken:
                raise RuntimeError(
                    f"{action} follows a backward() inside no_sync(), so the gradient of {flat.pieces[index].name!r} "
                    "is not averaged. Run the last backward() of a step outside no_sync()"
                )

    def forget(self, places: Iterable[Place]) -> None:
        """Drop the gradients of the given parameters, except gradients that are already averaged."""
        for flat, index in places:
            flat.gradient.taken.discard(index)

    def check_step(self, places: Sequence[Place], optimizer: ShardOptimizer, *_: object) -> None:
        """Hook before an optimizer's step: raise on all ranks unless all ranks take the same step. Collective."""
        problem: Exception | None = None
        try:
            self.check_reduced("optimizer.step()", places)
        except RuntimeError as error:
            problem = error
        # Remove GradScaler's attributes, which it deletes only after a successful step. Otherwise, a later step without
        # a GradScaler would also be refused.
        scaled = [optimizer.__dict__.pop(name, None) is not None for name in ("found_inf", "grad_scale")]
        if any(scaled):
            problem = RuntimeError(
                "GradScaler finds no infinity in other ranks' gradients. Use bfloat16 without a GradScaler"
            )
        known = {piece.name: piece.tensor.grad is not None for piece in optimizer.pieces}
        check_same_step([*known], [*known.values()], optimizer.param_groups, [], 0, self._comms.live.data, problem)
        # Without this barrier, a rank that fails in its next pass could interrupt another rank's check. With the
        # barrier, either all ranks take the step or none does.
        self._comms.base.barrier()
        self._change("agree")

    def end_step(self, *_: object) -> None:
        """Hook after an optimizer's step."""
        self._change("step")
        self.changed()

    def fail_step(self, error: BaseException) -> None:
        """Report an optimizer's error to the other ranks, unless `check_step` has raised an error on all ranks."""
        if self.phase is StepPhase.STEPPING:
            self._comms.fail_step(error)
        elif self._comms.live.data.exception() is not None:
            self._comms.live.reported = True
        self._change("fail")

    def free(self) -> None:
        """Release all units that no running module needs."""
        for unit in self._units:
            unit.free()

    def changed(self) -> None:
        """Release all units, because this rank's parts have changed."""
        self._version += 1
        self.free()
        for flat in self._flats:
            flat.changed()

    @contextmanager
    def whole(self, *, writeback: bool) -> Iterator[None]:
        """Gather all parameters. Collective."""
        self.check_idle("full_parameters()")
        self._recover()
        self.free()
        # Call `show_whole` only after everything is gathered. If a gather failed in between, the parameters already
        # passed to `show_whole` would remain views of their temporary tensor, and all later steps would compute with
        # its old values.
        wholes = [flat.gather_whole() for flat in self._flats]
        try:
            for flat, whole in zip(self._flats, wholes, strict=True):
                flat.show_whole(whole)
            for unit in self._units:
                # Hold the unit, because a module that runs inside the context would free it.
                unit.held = unit.gathered = True
            yield
        finally:
            for unit in self._units:
                unit.held = False
            # Check all parameters before writing any, so that the model keeps all changes or none.
            names = [flat.unlike_whole() for flat in self._flats] if writeback else []
            unlike = next((name for name in names if name is not None), None)
            writeback = writeback and unlike is None
            if writeback:
                # Copy all assigned values before writing any, because they may be views of each other's places, for
                # example if two parameters were swapped.
                pairs = zip(self._flats, wholes, strict=True)
                for place, values in [copied for flat, whole in pairs for copied in flat.assigned(whole)]:
                    place.copy_(values)
            for flat, whole in zip(self._flats, wholes, strict=True):
                flat.hide_whole(whole, writeback=writeback)
            self.changed()
        if unlike is not None:
            raise RuntimeError(
                f"{unlike!r} was given another shape, dtype or device inside full_parameters(), so no change was kept. "
                "Call remove(), change the model, and shard it again"
            )

    def remove(self) -> None:
        """Remove all hooks, and turn the parameters back into plain tensors with all elements. Collective."""
        self.check_idle("remove()")
        # The caller no longer needs gradients, so `_recover` must not raise if some were lost.
        self._change("step")
        self._recover()
        self.free()
        # If a gather fails here, the model is still sharded, and `remove` can be called again.
        wholes = [flat.gather_whole() for flat in self._flats]
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watch.remove()
        for flat in self._flats:
            # Keep no reference to the gathered tensor, because `restore` allocates memory for the parameters a second
            # time.
            flat.restore(wholes.pop(0))

    def recut(self) -> None:
        """Re-partition all units for the current communicator. Elements become undefined, and gradients are dropped."""
        self.free()
        self._order.forget()
        lengths: set[int] = set()
        for flat in self._flats:
            flat.recut(_padding(flat.parameters, self._comms.size, lengths))
        self.changed()

    def check_idle(self, action: str) -> None:
        """Raise `RuntimeError` if a forward, a backward or `full_parameters` is running."""
        if self._depth or self._in_backward() or any(unit.held for unit in self._units):
            raise RuntimeError(
                f"{action} was called inside a forward, a backward or full_parameters() of the same sharded model"
            )


Place = tuple[FlatParameters, int]
"""Flat parameters, and the index of one of them."""
