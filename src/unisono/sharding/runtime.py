"""Hooks of a sharded model: gather a unit before its modules run, reduce its gradients, free it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn

from unisono.communicator import Communicator
from unisono.errors import CommError, MismatchError
from unisono.sharding.flat_parameters import FlatParameters
from unisono.sharding.unit import Unit
from unisono.utils.backward_pass import BackwardPass, current_pass
from unisono.utils.graph import watch_outputs

__all__ = ["Runtime"]


class Runtime:
    """Gathers, frees and reduces the units of one model at the right times.

    Args:
        units: All units.
        comm: Communicator of its own.

    Attributes:
        sync: Whether backward passes reduce their gradients.
        version: Number of changes of the parameters.
    """

    def __init__(self, units: Sequence[Unit], comm: Communicator) -> None:
        self.units, self._comm = units, comm
        self.sync, self.version = True, 0
        on_cpu = all(p.device.type == "cpu" for unit in units for flat in unit.flats for p in flat.parameters)
        self._pass = BackwardPass(self._begin, self._end, self._fail, one_thread=on_cpu)
        self._overlaps = comm.overlaps
        self._call = count()
        # The unit that was needed after each one, in forward and in backward.
        self._next: dict[tuple[bool, int], Unit] = {}
        self._last: Unit | None = None
        self._handles: list[Any] = []

    # -- hooks ----------------------------------------------------------------------------------
    def hook(self) -> None:
        """Register all hooks."""
        for unit in self.units:
            for module in unit.modules:
                self._handles += [
                    module.register_forward_pre_hook(partial(self._enter, unit), prepend=True, with_kwargs=True),
                    module.register_forward_hook(partial(self._leave, unit), always_call=True),
                ]
            for flat in unit.flats:
                for index, parameter in enumerate(flat.parameters if flat.gradient else ()):
                    hook = partial(self._arrive, unit, flat, index)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def unhook(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
        unit.running.append(module)
        self._need(unit)

    def _leave(self, unit: Unit, module: nn.Module, _given: Any, returned: Any) -> None:
        if not unit.running or unit.running[-1] is not module:
            return
        unit.running.pop()
        if returned is not None and torch.is_grad_enabled():
            watch_outputs(returned, partial(self._reach, unit, self.version))
        if not unit.running and not self._in_backward():
            unit.free()

    def _in_backward(self) -> bool:
        return self._pass.is_open or current_pass() >= 0

    def _reach(self, unit: Unit, version: int, _gradient: torch.Tensor) -> None:
        """Hook of an output: a backward pass is about to need the unit."""
        self._pass.enter(current_pass())
        if version != self.version:
            raise RuntimeError("parameters of the sharded model were changed between forward and backward")
        self._need(unit)

    def _arrive(self, unit: Unit, flat: FlatParameters, index: int, parameter: torch.Tensor) -> None:
        """Hook of a parameter: its gradient is in p.grad."""
        self._pass.enter(current_pass())
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        assert flat.gradient is not None
        with torch.no_grad():
            flat.gradient.take(index, grad)
            if self.sync and unit.is_complete():
                unit.reduce(async_op=self._overlaps)
                unit.free()

    # -- schedule -------------------------------------------------------------------------------
    def _need(self, unit: Unit) -> None:
        if unit.gathered:
            return
        with torch.no_grad():
            unit.start_gather(async_op=False)
            unit.finish_gather()

    # -- backward pass --------------------------------------------------------------------------
    def _begin(self) -> None:
        pass

    def _end(self) -> None:
        with torch.no_grad():
            if self.sync:
                for unit in self.units:
                    unit.reduce(async_op=self._overlaps)
                for unit in self.units:
                    for gradient in unit.gradients:
                        gradient.commit()
        self.free()

    def _fail(self) -> None:
        for unit in self.units:
            for gradient in unit.gradients:
                gradient.drop()
        self.free()

    def free(self) -> None:
        """Release all units that no running module needs."""
        for unit in self.units:
            unit.free()
