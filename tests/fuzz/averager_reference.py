"""A slow averager that does what `GradientAverager` promises, to show what the fuzzer itself gets wrong.

It is called around `backward()`, after which all ranks vote and average one parameter after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from averager_graphs import Graph

import unisono as un
from unisono.errors import AbortedError, MismatchError

__all__ = ["ReferenceAverager", "Vote"]


class Vote(NamedTuple):
    """Message of a rank after a pass.

    Attributes:
        here: Whether it has data left.
        problem: Why its pass has failed, or None.
        used: The parameters whose gradients it has.
        weight: Of these.
        touched: Whether its pass has come to any.
    """

    here: bool
    problem: str | None = None
    used: frozenset[str] = frozenset()
    weight: float = 0.0
    touched: bool = False


class ReferenceAverager:
    """Averages gradients after `around(backward)`; options as for `GradientAverager`, of which sizes are ignored."""

    def __init__(
        self,
        model: torch.nn.Module | Iterable[torch.Tensor],
        comm: un.Communicator,
        *,
        find_unused_parameters: bool,
        average: str,
        broadcast_buffers: bool,
        **sizes: Any,
    ) -> None:
        self.model = model if isinstance(model, torch.nn.Module) else torch.nn.ParameterList(model)
        self.comm = comm
        self.find_unused_parameters = find_unused_parameters
        self.total = average == "sum"
        self.broadcast_buffers = broadcast_buffers
        comm.allow_any_thread()
        self.parameters = dict(self.model.named_parameters())
        self.known = self.tensors()
        self.weighs: float | None = None
        self.weight_in_use = False
        self.syncing = True
        self.steps = 0
        self.owed = set[str]()
        self.touched = set[str]()
        self.lost = set[str]()
        self.versions = dict[str, int]()
        self.handles = []
        for name, parameter in self.parameters.items():
            trains = parameter.requires_grad
            parameter.requires_grad_(True)
            self.handles.append(parameter.register_hook(partial(self.arrive, name)))
            self.handles.append(parameter.register_post_accumulate_grad_hook(partial(self.touch, name)))
            parameter.requires_grad_(trains)

    def tensors(self) -> dict[str, Any]:
        """The dtype and C++ identity of each parameter; `torch.utils.swap_tensors` keeps the Python object."""
        return {name: (p._cdata, p.dtype) for name, p in self.model.named_parameters()}

    def changes(self) -> dict[str, int]:
        """Number of times that each parameter was changed in place."""
        return {name: p._version for name, p in self.parameters.items()}

    def arrive(self, name: str, _gradient: torch.Tensor) -> None:
        """Hook: p.grad is about to be added to."""
        if name in self.touched and self.parameters[name].grad is None:
            self.lost.add(name)

    def touch(self, name: str, parameter: torch.Tensor) -> None:
        """Hook: p.grad has been added to, unless the parameter has been frozen since the forward."""
        if parameter.requires_grad:
            self.touched.add(name)
            if parameter.grad is None:
                self.lost.add(name)

    def weight(self, n_samples: float) -> None:
        if self.weight_in_use and any(p.grad is not None for p in self.parameters.values()):
            raise RuntimeError("weight() was called again")
        self.weighs = n_samples
        self.weight_in_use = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.syncing = False
        try:
            yield
        finally:
            self.syncing = True

    @contextmanager
    def join(self) -> Iterator[None]:
        yield
        votes = self.comm.all_gather_object(Vote(False))
        while any(vote.here for vote in votes):
            self.average(votes)
            votes = self.comm.all_gather_object(Vote(False))
        steps = self.comm.all_gather_object(self.steps)
        source = steps.index(max(steps))
        for parameter in self.parameters.values():
            self.comm.broadcast(parameter.detach(), source)
        self.share_buffers(source)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def around(self, outer: Callable[[Callable[[], None]], None], backward: Callable[[], None]) -> None:
        """Run `backward` in another function of this kind, and average."""
        self.touched.clear()
        self.lost.clear()
        self.versions = self.changes()
        held = {name: (p.grad, _copied(p.grad)) for name, p in self.parameters.items()}
        try:
            self.run(partial(outer, backward))
        except BaseException:
            self.restore(held)
            raise

    def run(self, backward: Callable[[], None]) -> None:
        if not self.syncing:
            backward()
            self.owed |= self.touched
            self.weight_in_use = self.weighs is not None
            return
        error = None
        try:
            backward()
            self.check()
        except Exception as caught:
            error = caught
        names = {name for name in self.touched | self.owed if self.parameters[name].requires_grad}
        used = frozenset(name for name in names if self.parameters[name].grad is not None)
        weight = 1.0 if self.weighs is None else self.weighs
        problem = None if error is None else str(error)
        votes = self.comm.all_gather_object(Vote(True, problem, used, weight, bool(self.touched)))
        if error is not None:
            raise error
        problems = [vote.problem for vote in votes if vote.problem is not None]
        if problems:
            raise AbortedError(f"the pass of another rank failed: {problems[0]}")
        if not self.find_unused_parameters and any(vote.here and vote.used != used for vote in votes):
            raise MismatchError("ranks use different parameters")
        self.average(votes)
        self.weighs = None
        self.weight_in_use = False
        self.steps += 1

    def check(self) -> None:
        """Raise an error if the model has changed, or a hook has taken a gradient away."""
        if self.tensors() != self.known:
            raise RuntimeError("the model has changed")
        lost = self.lost | {name for name in self.touched if self.parameters[name].grad is None}
        lost |= {name for name, count in self.changes().items() if count != self.versions[name]}
        if lost:
            raise RuntimeError(f"hooks have used gradients of {sorted(lost)}")

    def average(self, votes: list[Vote]) -> None:
        # Else it is one of several averagers, to whose part no pass has come.
        if isinstance(self.model, Graph) or any(vote.touched for vote in votes):
            self.average_all(sorted(self.chosen(votes)), votes)
        if self.broadcast_buffers:
            self.share_buffers(self.source(votes))

    def chosen(self, votes: list[Vote]) -> set[str]:
        """The parameters that are averaged."""
        return set[str]().union(*(vote.used for vote in votes))

    def source(self, votes: list[Vote]) -> int:
        """The rank that has the buffers of all."""
        return [vote.here for vote in votes].index(True)

    def average_all(self, names: Iterable[str], votes: list[Vote]) -> None:
        here = votes[self.comm.rank].here
        factor = votes[self.comm.rank].weight / (1.0 if self.total else sum(vote.weight for vote in votes))
        with torch.no_grad():
            for name in names:
                self.average_one(self.parameters[name], factor, here)
                self.owed.discard(name)

    def average_one(self, parameter: torch.Tensor, factor: float, here: bool) -> None:
        grad = parameter.grad if here else None
        kinds = self.comm.all_gather_object(None if grad is None else grad.is_sparse)
        mean = torch.zeros_like(parameter) if grad is None or not factor else grad.detach().to_dense() * factor
        self.comm.all_reduce(mean)
        if here:
            self.assign(parameter, mean if False in kinds else mean.to_sparse(1))

    def assign(self, parameter: torch.Tensor, mean: torch.Tensor) -> None:
        """Put a mean where it belongs."""
        grad = parameter.grad
        if grad is not None and grad.layout == torch.strided:
            grad.detach().copy_(mean)
        else:
            parameter.grad = mean

    def share_buffers(self, source: int) -> None:
        for module in self.model.modules():
            for name, buffer in [*module.named_buffers(recurse=False)]:
                other = buffer.clone()
                setattr(module, name, other)
                self.comm.broadcast(other, source)

    def restore(self, held: dict[str, tuple[torch.Tensor | None, torch.Tensor | None]]) -> None:
        for name, (grad, copy) in held.items():
            if grad is not None and copy is not None and not grad.is_sparse:
                grad.detach().copy_(copy)
                self.parameters[name].grad = grad
            else:
                self.parameters[name].grad = copy


def _copied(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else grad.detach().clone()
