"""Averagers with a fault, which the fuzzer has to find."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from averager_reference import ReferenceAverager, Vote

__all__ = ["MUTANTS"]


class _ForgetsWeights(ReferenceAverager):
    def average_all(self, names: Iterable[str], votes: list[Vote]) -> None:
        super().average_all(names, [vote._replace(weight=float(vote.here)) for vote in votes])


class _ForgetsWeightsInNoSync(ReferenceAverager):
    """A weight counts for the next pass, whether that averages or not."""

    def run(self, backward: Callable[[], None]) -> None:
        super().run(backward)
        self.weighs = None


class _KeepsWeights(ReferenceAverager):
    """A weight counts until there is another one."""

    def run(self, backward: Callable[[], None]) -> None:
        weight = self.weighs
        super().run(backward)
        self.weighs = weight


class _AllowsSecondWeights(ReferenceAverager):
    def weight(self, n_samples: float) -> None:
        self.weighs = n_samples


class _LosesWeights(ReferenceAverager):
    """A failed pass takes the weight with it."""

    def restore(self, held: dict[str, Any]) -> None:
        super().restore(held)
        self.weighs = None


class _SkipsFirst(ReferenceAverager):
    """A parameter's gradient stays that of the rank."""

    def average_one(self, parameter: torch.Tensor, factor: float, here: bool) -> None:
        if parameter is not next(iter(self.parameters.values())):
            super().average_one(parameter, factor, here)


class _SkipsThawed(ReferenceAverager):
    """Parameters that were frozen at first are never averaged."""

    def __init__(self, model: torch.nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(model, *args, **options)
        self.thawed = {id(p) for p in model.parameters() if not p.requires_grad}

    def average_one(self, parameter: torch.Tensor, factor: float, here: bool) -> None:
        if id(parameter) not in self.thawed:
            super().average_one(parameter, factor, here)


class _MeansOfUsers(ReferenceAverager):
    """Ranks that do not use a parameter do not count."""

    def average_one(self, parameter: torch.Tensor, factor: float, here: bool) -> None:
        users = sum(self.comm.all_gather_object(parameter.grad is not None))
        super().average_one(parameter, factor * self.comm.size / max(1, users), here)


class _MeansForSums(ReferenceAverager):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "average": "mean"})


class _ZeroesFrozen(ReferenceAverager):
    """A pass of other parameters sets the gradient of a frozen one to zero."""

    def average_all(self, names: Iterable[str], votes: list[Vote]) -> None:
        super().average_all(names, votes)
        for parameter in self.parameters.values():
            if parameter.grad is not None and not parameter.requires_grad:
                parameter.grad.detach().zero_()


class _AveragesAll(ReferenceAverager):
    """Gradients are averaged although no rank's pass has added to them."""

    def chosen(self, votes: list[Vote]) -> set[str]:
        mine = {name for name, p in self.parameters.items() if p.grad is not None and p.requires_grad}
        return super().chosen(votes).union(*self.comm.all_gather_object(mine))


class _AveragesFrozen(ReferenceAverager):
    """Gradients accumulated before their parameter was frozen are averaged by the next pass."""

    def chosen(self, votes: list[Vote]) -> set[str]:
        return super().chosen(votes).union(*self.comm.all_gather_object(self.owed))


class _ForgetsFrozen(ReferenceAverager):
    """Gradients accumulated before their parameter was frozen are never averaged."""

    def average_all(self, names: Iterable[str], votes: list[Vote]) -> None:
        super().average_all(names, votes)
        self.owed.clear()


class _LeavesOutFrozen(ReferenceAverager):
    """A rank on which a parameter is frozen does not contribute what its gradient held before."""

    def average_one(self, parameter: torch.Tensor, factor: float, here: bool) -> None:
        if parameter.grad is not None and not parameter.requires_grad:
            parameter.grad.detach().zero_()
        super().average_one(parameter, factor, here)


class _ReplacesTensors(ReferenceAverager):
    """A gradient is a new tensor, whatever it was before."""

    def assign(self, parameter: torch.Tensor, mean: torch.Tensor) -> None:
        if parameter.grad is not None and not parameter.grad.requires_grad:
            parameter.grad = None
        super().assign(parameter, mean)


class _RestoresCopies(ReferenceAverager):
    """After a pass that failed, gradients have their values, but are other tensors."""

    def restore(self, held: dict[str, Any]) -> None:
        super().restore({name: (None if copy is None else copy.clone(), copy) for name, (_, copy) in held.items()})


class _FillsGaps(ReferenceAverager):
    """The memory between two gradients is written, too."""

    def assign(self, parameter: torch.Tensor, mean: torch.Tensor) -> None:
        super().assign(parameter, mean)
        if parameter.grad is not None and parameter.grad.layout == torch.strided and not parameter.grad.requires_grad:
            storage = parameter.grad.untyped_storage().nbytes() // parameter.grad.element_size()
            place = parameter.grad.storage_offset() + parameter.numel() * max(parameter.grad.stride(), default=1)
            if parameter.dim() == 1 and place < storage:
                parameter.grad.as_strided((1,), (1,), place).zero_()


class _AllowsLostGradients(ReferenceAverager):
    """A gradient that a hook has taken away counts as unused."""

    def check(self) -> None:
        self.lost.clear()
        self.touched -= {name for name in self.touched if self.parameters[name].grad is None}
        super().check()


class _SharesNoBuffers(ReferenceAverager):
    def share_buffers(self, source: int) -> None:
        pass


class _SharesBuffersInPlace(ReferenceAverager):
    """Buffers that the graph of another forward holds are written."""

    def share_buffers(self, source: int) -> None:
        for buffer in self.model.buffers():
            self.comm.broadcast(buffer.data, source)


class _SharesFirstBuffers(ReferenceAverager):
    """Buffers that a forward has assigned since the start are left out."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.buffers = list(self.model.buffers())

    def share_buffers(self, source: int) -> None:
        for buffer in self.buffers:
            self.comm.broadcast(buffer.data, source)


class _SharesBuffersOfRank0(ReferenceAverager):
    """In join, buffers come from a rank that has no data left."""

    def source(self, votes: list[Vote]) -> int:
        return 0


class _CountsDone(ReferenceAverager):
    """In join, ranks that have no data left count in the mean."""

    def average_all(self, names: Iterable[str], votes: list[Vote]) -> None:
        super().average_all(names, [vote if vote.here else vote._replace(weight=1.0) for vote in votes])


class _RealPartsOnly(ReferenceAverager):
    def average_one(self, parameter: torch.Tensor, factor: float, here: bool) -> None:
        if parameter.grad is not None and parameter.grad.is_complex():
            parameter.grad.imag.zero_()
        super().average_one(parameter, factor, here)


class _SinglePrecision(ReferenceAverager):
    def average_one(self, parameter: torch.Tensor, factor: float, here: bool) -> None:
        super().average_one(parameter, factor, here)
        if parameter.grad is not None and parameter.dtype == torch.float64:
            parameter.grad = parameter.grad.float().double()


class _Densifies(ReferenceAverager):
    def average_one(self, parameter: torch.Tensor, factor: float, here: bool) -> None:
        super().average_one(parameter, factor, here)
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

    def run(self, backward: Callable[[], None]) -> None:
        self.syncing = True
        super().run(backward)


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
