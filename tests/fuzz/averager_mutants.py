"""Averagers with a fault, which the fuzzer has to find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from averager_reference import ReferenceAverager

__all__ = ["MUTANTS"]


class _ForgetsWeights(ReferenceAverager):
    def average(self, weights: list[float]) -> None:
        super().average([1.0] * len(weights))


class _KeepsWeights(ReferenceAverager):
    """A weight counts until there is another one."""

    def around(self, backward: Callable[[], None]) -> None:
        weight = self.weighs
        super().around(backward)
        self.weighs = weight


class _LosesWeights(ReferenceAverager):
    """A failed pass takes the weight with it."""

    def restore(self, held: dict[str, Any]) -> None:
        super().restore(held)
        self.weighs = None


class _SkipsFirst(ReferenceAverager):
    """A parameter's gradient stays that of the rank."""

    def average_one(self, parameter: torch.Tensor, factor: float) -> None:
        if parameter is not next(iter(self.parameters.values())):
            super().average_one(parameter, factor)


class _SkipsThawed(ReferenceAverager):
    """Parameters that were frozen at first are never averaged."""

    def __init__(self, model: torch.nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(model, *args, **options)
        self.thawed = {id(p) for p in model.parameters() if not p.requires_grad}

    def average_one(self, parameter: torch.Tensor, factor: float) -> None:
        if id(parameter) not in self.thawed:
            super().average_one(parameter, factor)


class _MeansOfUsers(ReferenceAverager):
    """Ranks that do not use a parameter do not count."""

    def average_one(self, parameter: torch.Tensor, factor: float) -> None:
        users = sum(self.comm.all_gather_object(parameter.grad is not None))
        super().average_one(parameter, factor * self.comm.size / max(1, users))


class _MeansForSums(ReferenceAverager):
    def average(self, weights: list[float]) -> None:
        self.total = False
        super().average(weights)


class _RealPartsOnly(ReferenceAverager):
    def average_one(self, parameter: torch.Tensor, factor: float) -> None:
        if parameter.grad is not None and parameter.grad.is_complex():
            parameter.grad.imag.zero_()
        super().average_one(parameter, factor)


class _SinglePrecision(ReferenceAverager):
    def average_one(self, parameter: torch.Tensor, factor: float) -> None:
        super().average_one(parameter, factor)
        if parameter.grad is not None and parameter.dtype == torch.float64:
            parameter.grad = parameter.grad.float().double()


class _Densifies(ReferenceAverager):
    def average_one(self, parameter: torch.Tensor, factor: float) -> None:
        super().average_one(parameter, factor)
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to_dense()


class _LeavesFailedGradients(ReferenceAverager):
    def restore(self, held: dict[str, Any]) -> None:
        pass


class _ClearsAfterFailures(ReferenceAverager):
    """A failed pass takes with it what was accumulated before."""

    def restore(self, held: dict[str, Any]) -> None:
        self.model.zero_grad()


class _ForgetsAccumulated(ReferenceAverager):
    """Only the last pass counts."""

    def run(self, backward: Callable[[], None]) -> None:
        self.model.zero_grad()
        super().run(backward)


class _AccumulatesAtEnd(ReferenceAverager):
    """Right gradients at the end, but hooks see those of the pass alone."""

    def run(self, backward: Callable[[], None]) -> None:
        held = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        self.model.zero_grad()

        def accumulating() -> None:
            backward()
            for name, grad in held.items():
                own = self.parameters[name].grad
                self.parameters[name].grad = grad if own is None else grad + own

        super().run(accumulating)


class _AveragesAlways(ReferenceAverager):
    """No no_sync."""

    def around(self, backward: Callable[[], None]) -> None:
        self.syncing = True
        super().around(backward)


class _AllowsMismatches(ReferenceAverager):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "find_unused_parameters": True})


class _AllowsChanges(ReferenceAverager):
    def tensors(self) -> dict[str, Any]:
        return {}


class _AllowsSwaps(ReferenceAverager):
    def tensors(self) -> dict[str, Any]:
        return {name: id(p) for name, p in self.model.named_parameters()}


MUTANTS: list[type[ReferenceAverager]] = [
    value for value in list(globals().values()) if isinstance(value, type) and issubclass(value, ReferenceAverager)
][1:]
