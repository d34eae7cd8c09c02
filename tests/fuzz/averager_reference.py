"""A slow averager that does what `GradientAverager` promises, to show what the fuzzer itself gets wrong.

It is called around `backward()`, after which all ranks vote and average one parameter after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

import unisono as un
from unisono.errors import AbortedError, MismatchError

__all__ = ["ReferenceAverager"]


class ReferenceAverager:
    """Averages gradients after `around(backward)`; options as for `GradientAverager`, of which sizes are ignored."""

    def __init__(
        self, model: torch.nn.Module, comm: un.Communicator, *, find_unused_parameters: bool, average: str, **sizes: Any
    ) -> None:
        self.model, self.comm, self.find_unused_parameters, self.total = (
            model,
            comm,
            find_unused_parameters,
            average == "sum",
        )
        comm.allow_any_thread()
        self.parameters = dict(model.named_parameters())
        self.known = self.tensors()
        self.weighs: float | None = None
        self.syncing = True
        self.owed, self.touched = set[str](), set[str]()
        self.handles = []
        for name, parameter in self.parameters.items():
            trains = parameter.requires_grad
            parameter.requires_grad_(True)
            self.handles.append(parameter.register_post_accumulate_grad_hook(partial(self.touch, name)))
            parameter.requires_grad_(trains)

    def tensors(self) -> dict[str, Any]:
        """The dtype and C++ identity of each parameter; `torch.utils.swap_tensors` keeps the Python object."""
        return {name: (p._cdata, p.dtype) for name, p in self.model.named_parameters()}

    def touch(self, name: str, parameter: torch.Tensor) -> None:
        self.touched.add(name)

    def weight(self, n_samples: float) -> None:
        self.weighs = n_samples

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.syncing = False
        try:
            yield
        finally:
            self.syncing = True

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def around(self, backward: Callable[[], None]) -> None:
        """Run `backward`, and average."""
        self.touched.clear()
        held = {name: (p.grad, _copied(p.grad)) for name, p in self.parameters.items()}
        try:
            self.run(backward) if self.syncing else backward()
        except BaseException:
            self.restore(held)
            raise
        if not self.syncing:
            self.owed |= self.touched
            return
        self.owed.clear()
        self.weighs = None

    def run(self, backward: Callable[[], None]) -> None:
        error = None
        try:
            backward()
            if self.tensors() != self.known:
                raise RuntimeError("the model has changed")
        except Exception as caught:
            error = caught
        used = {name for name in self.touched | self.owed if self.parameters[name].grad is not None}
        said = self.comm.all_gather_object((error is None, used, 1.0 if self.weighs is None else self.weighs))
        if error is not None:
            raise error
        if not all(fine for fine, _, _ in said):
            raise AbortedError("the pass of another rank failed")
        if not self.find_unused_parameters and any(used != other for _, other, _ in said):
            raise MismatchError("ranks use different parameters")
        self.average([weight for _, _, weight in said])

    def average(self, weights: list[float]) -> None:
        factor = weights[self.comm.rank] / (1.0 if self.total else sum(weights))
        with torch.no_grad():
            for parameter in self.parameters.values():
                self.average_one(parameter, factor)

    def average_one(self, parameter: torch.Tensor, factor: float) -> None:
        grad = parameter.grad
        kinds = self.comm.all_gather_object(None if grad is None else grad.is_sparse)
        if not parameter.requires_grad or kinds.count(None) == len(kinds):
            return
        mean = torch.zeros_like(parameter) if grad is None or not factor else grad.detach().to_dense() * factor
        self.comm.all_reduce(mean)
        if grad is not None and grad.requires_grad:
            grad.detach().copy_(mean)
        else:
            parameter.grad = mean if False in kinds else mean.to_sparse(1)

    def restore(self, held: dict[str, tuple[torch.Tensor | None, torch.Tensor | None]]) -> None:
        for name, (grad, copy) in held.items():
            if grad is not None and copy is not None and not grad.is_sparse:
                grad.detach().copy_(copy)
                self.parameters[name].grad = grad
            else:
                self.parameters[name].grad = copy


def _copied(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else grad.detach().clone()
