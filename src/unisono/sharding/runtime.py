"""Hooks of a sharded model: gather a unit before its modules run, reduce its gradients, free it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from unisono.core.staging import OneStream
from unisono.errors import MismatchError
from unisono.sharding.comms import NO_COPY, ShardComms
from unisono.sharding.flat_parameters import FlatParameters
from unisono.sharding.unit import ForwardCall, Unit, recut_units
from unisono.utils.backward_pass import BackwardTracker, current_pass, watch_outputs

__all__ = ["Runtime"]


class Runtime:
    """Gathers, frees and reduces the units of one model at the right times.

    Every module has hooks, so a module that is called directly gathers its unit too. Outputs of each module have a
    hook that gathers its unit before its backward.

    Args:
        units: All units.
        comms: Communicator of its own.

    Attributes:
        sync: Whether backward passes reduce their gradients.
    """

    def __init__(self, units: Sequence[Unit], comms: ShardComms) -> None:
        self._units = units
        self._comms = comms
        self.sync = True
        self._stream = OneStream({p.device for unit in units for flat in unit.flats for p in flat.parameters})
        self._pass = BackwardTracker(self._begin, self._end, self._fail, one_thread=self._stream.on_cpu)
        self._handles: list[Any] = []
        self._version = 0  # of changes of the parameters
        # Number of running modules, and the exception that was handled when the outermost one began.
        self._depth = 0
        self._outer: BaseException | None = None
        self._begun = self._syncing = self._whole = False
        # The unit that was gathered after each one, in forward and in backward.
        self._next: dict[tuple[bool, Unit], Unit] = {}
        self._previous: Unit | None = None
        # The last unit that was gathered in the running forward, and in the forward before.
        self._latest: Unit | None = None
        self._last: Unit | None = None
        self._reducing: Unit | None = None

    # -- hooks ----------------------------------------------------------------------------------
    def hook(self) -> None:
        """Register all hooks."""
        for unit in self._units:
            for module in unit.modules:
                self._handles += [
                    module.register_forward_pre_hook(partial(self._enter, unit), prepend=True, with_kwargs=True),
                    module.register_forward_hook(partial(self._leave, unit), always_call=True),
                ]
            for flat in unit.flats:
                for index, parameter in enumerate(flat.parameters if flat.gradient else ()):
                    hook = partial(self._arrive, unit, flat, index)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def __getstate__(self) -> Any:
        # A deep copy of the model reaches this through the hooks.
        raise TypeError(NO_COPY)

    def _enter(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None:
            raise RuntimeError("torch.compile cannot trace a ShardedModel's hooks. Compile functions inside modules")
        if self._depth == 0 and not self._in_backward():
            self._begin_forward()
        outermost = not unit.running
        unit.running.append(module)
        self._depth += 1
        unit.check()
        self._need(unit)
        if outermost:
            unit.call = ForwardCall()
            if torch.is_grad_enabled() and not unit.frees_after_gradients:
                unit.call.inputs = watch_outputs((args, kwargs), partial(self._leave_backward, unit, unit.call))

    def _leave(self, unit: Unit, module: nn.Module, _given: Any, returned: Any) -> None:
        # Another hook may have raised before `_enter` was called.
        if not unit.running or unit.running[-1] is not module:
            return
        unit.running.pop()
        self._depth -= 1
        raised = sys.exception() if sys.exception() is not self._outer else None
        written = unit.written() if raised is None and not unit.running and not unit.held else None
        watched = 0
        if torch.is_grad_enabled():
            watched = watch_outputs(returned, partial(self._reach, unit, unit.call, self._version))
        if not self._in_backward():
            stays = watched and (unit.name == "" or unit is self._last)
            if not unit.running and not stays and not unit.is_seen_by(returned):
                unit.free()
            if self._depth == 0 and (error := raised or written) is not None:
                self.free()
                self._comms.abort(f"a forward of the sharded model has failed there: {error!r}")
        if written is not None:
            raise written

    def _reach(self, unit: Unit, call: ForwardCall, version: int, _gradient: torch.Tensor) -> None:
        """Gather the unit, because a backward pass has reached its output."""
        self._pass.enter(current_pass())
        if version != self._version:
            raise RuntimeError(
                f"parameters were changed between the forward and the backward of unit {unit.name!r} of a sharded "
                "model. Call backward() before optimizer.step()"
            )
        if call not in unit.open:
            unit.open.add(call)
            call.left = call.inputs
        self._need(unit)

    def _leave_backward(self, unit: Unit, call: ForwardCall, _gradient: torch.Tensor) -> None:
        """Free a unit with frozen parameters, because all inputs of its calls have their gradients."""
        call.left -= 1
        if call.left == 0:
            unit.open.discard(call)
            if not unit.open:
                unit.free()

    def _arrive(self, unit: Unit, flat: FlatParameters, index: int, parameter: torch.Tensor) -> None:
        """Take the gradient that was added to p.grad."""
        self._pass.enter(current_pass())
        flat.take(index)
        if self._syncing and unit.is_complete():
            if unit.frees_after_gradients:
                unit.free()
            self._reduce(unit)

    # -- schedule -------------------------------------------------------------------------------
    def _in_backward(self) -> bool:
        return self._pass.is_open or current_pass() >= 0

    def _begin_forward(self) -> None:
        self._outer = sys.exception()
        self._stream.begin()
        self._recover()
        # Parameters may have changed since, so units that an earlier forward has kept are gathered again.
        self.free()
        self._last = self._latest
        self._latest = None
        self._previous = None

    def _recover(self) -> None:
        """Make a new communicator where a pass has failed, and drop the step. Collective then."""
        if not self._comms.replace():
            return
        # Ranks were at different units, and some may lack gradients of a pass that had ended elsewhere.
        self._next.clear()
        self._latest = None
        for unit in self._units:
            unit.drop()
            for piece in (piece for flat in unit.flats for piece in flat.pieces):
                piece.tensor.grad = None

    def _need(self, unit: Unit) -> None:
        self._stream.check()
        if unit.gathered:
            return
        backward = self._in_backward()
        overlaps = self._comms.data.overlaps
        if self._previous is not None:
            self._next[backward, self._previous] = unit
        self._previous = unit
        if not backward:
            self._latest = unit
        with torch.no_grad():
            unit.start_gather(async_op=overlaps)
            if overlaps and (following := self._next.get((backward, unit))) is not None:
                following.start_gather(async_op=True)
            unit.finish_gather()

    def _reduce(self, unit: Unit) -> None:
        with torch.no_grad():
            if self._reducing is not None:
                self._reducing.finish_reduce()
            unit.start_reduce(async_op=self._comms.data.overlaps)
            self._reducing = unit

    # -- backward pass --------------------------------------------------------------------------
    def _begin(self) -> None:
        self._begun = True
        self._syncing = self.sync
        self._previous = None
        for unit in self._units:
            unit.begin_backward()

    def _end(self) -> None:
        if self._syncing:
            for unit in self._units:
                if (error := unit.written()) is not None:
                    raise error
            self._agree()
            for unit in self._units:
                if unit.has_taken():
                    self._reduce(unit)
            for unit in self._units:
                unit.commit()
        self._begun = False
        self._reducing = None
        self.free()

    def _fail(self) -> None:
        if not self._begun:
            return
        self._begun = False
        self._reducing = None
        self._comms.abort("a backward of the sharded model has failed there")
        if sum(unit.drop() for unit in self._units) and not self._syncing:
            warnings.warn("backward() has raised inside no_sync(): gradients of earlier passes are lost", stacklevel=2)
        self.free()

    def _agree(self) -> None:
        """`MismatchError` on every rank if ranks have gradients of different parameters. Collective."""
        known = [(name, here) for unit in self._units for name, here in unit.presence()]
        if not known:
            return
        device = next(flat.part.device for unit in self._units for flat in unit.flats)
        here = torch.tensor([there for _, there in known], dtype=torch.uint8, device=device)
        both = torch.cat([here, 1 - here])
        self._comms.data.all_reduce(both, "max")
        differs = (both[: len(known)] & both[len(known) :]).tolist()
        if 1 in differs:
            raise MismatchError(
                f"only some ranks have a gradient of {known[differs.index(1)][0]!r}. All ranks must use the same "
                "parameters in a step of a sharded model",
                rank=self._comms.data.rank,
                size=self._comms.data.size,
            )

    # -- from step to step ----------------------------------------------------------------------
    def free(self) -> None:
        """Release all units that no running module needs."""
        for unit in self._units:
            unit.free()

    def changed(self) -> None:
        """Release all units, because this rank's parts have changed."""
        self._version += 1
        self.free()
        for unit in self._units:
            for flat in unit.flats:
                flat.changed()

    @contextmanager
    def whole(self, *, writeback: bool) -> Iterator[None]:
        """Show all parameters whole. Collective."""
        self.check_idle("full_parameters()")
        self._recover()
        self.free()
        flats = [flat for unit in self._units for flat in unit.flats]
        wholes = [flat.show_whole() for flat in flats]
        self._whole = True
        for unit in self._units:
            unit.held = True
        try:
            yield
        finally:
            self._whole = False
            for unit in self._units:
                unit.held = False
            for flat, whole in zip(flats, wholes, strict=True):
                flat.hide_whole(whole, writeback=writeback)
            self.changed()

    def remove(self) -> None:
        """Remove all hooks, and let the parameters be whole and plain. Collective."""
        self.check_idle("remove()")
        self._recover()
        self.free()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for unit in self._units:
            for flat in unit.flats:
                flat.restore()

    def recut(self) -> None:
        """Divide all units among the ranks that the communicator now has, with undefined elements."""
        self.free()
        for unit in self._units:
            unit.drop()
        # Ranks may have been at different units.
        self._next.clear()
        self._latest = self._previous = self._reducing = None
        recut_units(self._units, self._comms)
        self.changed()

    def check_idle(self, action: str) -> None:
        """`RuntimeError` inside a forward or backward."""
        if self._depth or self._whole or self._in_backward():
            raise RuntimeError(
                f"{action} was called inside a forward, a backward or full_parameters() of the same sharded model"
            )
