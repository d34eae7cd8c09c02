"""Local SGD and DiLoCo: ranks train independently, and periodically average what they have learnt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unisono.checkpoint.divergence import assert_equal_tensors
from unisono.communicator import Communicator
from unisono.gradients.periodic import PeriodicAction, Schedule, over_buckets
from unisono.utils.parameters import Model, agree_on_parameters, check_parameters, named_tensors

__all__ = ["DiLoCo", "LocalSGD"]


class LocalSGD(PeriodicAction):
    """Local SGD: average parameters over ranks every n-th step, instead of gradients at each step.

    Method: Stich, Local SGD converges fast and communicates little (2019). After an average
    all ranks hold the same bits. Construction is collective, and so is each `step` that averages.

    Args:
        model: A module, or its parameters; frozen ones are averaged too, so leave them out if they are many.
            Integer ones stay unchanged.
        comm: The ranks that average.
        every: 8, or `every(8, warmup=100)`, or a function of the step's number (from 1).
        buffers: Also average a module's floating-point buffers, such as the statistics of BatchNorm.
        average_state: Also average the state that the attached optimizer keeps for each parameter in
            the parameter's shape (momentum, Adam's moments). Needs `attach`.
        bucket_cap_mb: Size of a message in MiB.

    Raises:
        MismatchError: Ranks have different parameters or arguments, or optimizers in different states.
        ValueError: `every` is less than 1.

    Cost: each n-th step one all_reduce of the parameters' bytes; nothing in between.

    Example:
        >>> from unisono.gradients.local_sgd import LocalSGD
        >>> def program(comm):
        ...     w = torch.zeros(2, requires_grad=True)
        ...     optimizer = torch.optim.SGD([w], lr=1.0)
        ...     local = LocalSGD([w], comm, every=2)
        ...     for _ in range(4):
        ...         w.grad = torch.full((2,), -1.0 - comm.rank)
        ...         optimizer.step()
        ...         averaged = local.step()
        ...     return averaged, w.tolist()
        >>> un.launch(program, 2, "thread")
        [(True, [6.0, 6.0]), (True, [6.0, 6.0])]
    """

    def __init__(
        self,
        model: Model,
        comm: Communicator,
        every: int | Schedule = 8,
        *,
        buffers: bool = False,
        average_state: bool = False,
        bucket_cap_mb: float = 25,
    ) -> None:
        self._average_state = average_state
        self._cap = bucket_cap_mb
        settings = {"average_state": average_state, "bucket_cap_mb": bucket_cap_mb}
        super().__init__(model, comm, every, buffers=buffers, settings=settings)

    def step(self) -> bool:
        if self._average_state and self._optimizer is None:
            raise ValueError("average_state=True needs the optimizer: call attach(optimizer) first")
        return super().step()

    def average(self) -> None:
        """Average now, regardless of the schedule; for the end of training, for instance. Collective."""
        self._now()

    def _act(self) -> None:
        tensors = [t for t in self.tensors if _averages(t)]
        if self._average_state:
            state = self._state()
            # Optimizers create their state at a parameter's first gradient, which may arrive on some ranks only.
            agree_on_parameters(state, self._comm, of="the optimizer's state", frozen=False)
            tensors += [tensor for _, tensor in state]
        over_buckets(tensors, self._cap, lambda flat: self._comm.all_reduce(flat, "avg"))

    def _state(self) -> list[tuple[str, torch.Tensor]]:
        kept = self._optimizer.state if self._optimizer is not None else {}
        return [
            (f"{name}.{key}", value)
            for name, parameter in self.named
            for key, value in sorted(kept.get(parameter, {}).items())
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and _averages(value)
        ]


def _averages(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


_Outer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


class DiLoCo(PeriodicAction):
    """Outer optimizer that takes the ranks' mean parameter change as its gradient, every n-th step.

    Ranks start from a common anchor, train independently for n steps, and average anchor - parameters.
    The outer optimizer (SGD with Nesterov momentum) steps the anchor with that average, and all ranks continue from
    the anchor. Method: Douillard et al., DiLoCo, distributed low-communication training of
    language models (2023). After each outer step all ranks hold the same bits. The inner optimizer and
    its state stay with each rank. Construction is collective, and so is each `step` that runs the outer optimizer.

    Args:
        model: A module, or its parameters, equal on all ranks. Integer parameters stay unchanged.
        comm: The ranks that train.
        every: 50, or an `every(...)`, or a function of the step's number (from 1).
        outer_lr, outer_momentum, nesterov: Settings of the outer SGD.
        outer: Factory of another outer optimizer, from the anchor's tensors; the three before it then have no effect.
        bucket_cap_mb: Size of a message in MiB.

    Raises:
        MismatchError: Ranks have different parameters (values too: see `un.broadcast_parameters`) or arguments.
        ValueError: `every` is less than 1, or what the outer optimizer refuses.

    Attributes:
        anchor: For each parameter, its value when all ranks were last equal; of the parameter's dtype.
        outer: The outer optimizer; its learning rate may be scheduled as any other's.

    Cost: each n-th step one all_reduce of the parameters' bytes. Memory: the parameters twice more (the
    anchor, the momentum), and once again while the outer optimizer steps.

    Example:
        >>> from unisono.gradients.local_sgd import DiLoCo
        >>> def program(comm):
        ...     w = torch.zeros(2, requires_grad=True)
        ...     optimizer = torch.optim.SGD([w], lr=1.0)
        ...     diloco = DiLoCo([w], comm, every=2, outer_lr=0.5, outer_momentum=0.0, nesterov=False)
        ...     diloco.attach(optimizer)
        ...     for _ in range(2):
        ...         w.grad = torch.full((2,), -1.0 - comm.rank)
        ...         optimizer.step()
        ...     return w.tolist()
        >>> un.launch(program, 2, "thread")
        [[1.5, 1.5], [1.5, 1.5]]
    """

    def __init__(
        self,
        model: Model,
        comm: Communicator,
        every: int | Schedule = 50,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        *,
        outer: _Outer | None = None,
        bucket_cap_mb: float = 25,
    ) -> None:
        self._cap = bucket_cap_mb
        named = [(name, t) for name, t in named_tensors(model) if t.is_floating_point() or t.is_complex()]
        check_parameters(named)
        self.anchor = [t.detach().clone() for _, t in named]
        if outer is None:
            made = f"SGD(lr={outer_lr}, momentum={outer_momentum}, nesterov={nesterov})"
            self.outer: torch.optim.Optimizer = torch.optim.SGD(
                self.anchor, lr=outer_lr, momentum=outer_momentum, nesterov=nesterov
            )
        else:
            self.outer = outer(self.anchor)
            made = type(self.outer).__name__
        settings = {"outer": made, "bucket_cap_mb": bucket_cap_mb}
        super().__init__(named, comm, every, settings=settings)
        try:
            advice = "un.broadcast_parameters(model, comm) makes them equal"
            assert_equal_tensors(named, self._comm, "parameters differ between ranks", advice)
        except Exception:
            # Whatever it was is raised again; the communicator that was made must not stay open.
            self._comm.close()
            raise

    def outer_step(self) -> None:
        """Step the outer optimizer now, regardless of the schedule. Collective.

        Example:
            >>> def program(comm):
            ...     w = torch.zeros(1, requires_grad=True)
            ...     diloco = un.gradients.DiLoCo([w], comm, outer_lr=1.0, outer_momentum=0.0, nesterov=False)
            ...     w.data += comm.rank
            ...     diloco.outer_step()
            ...     return w.item()
            >>> un.launch(program, 3, "thread")
            [1.0, 1.0, 1.0]
        """
        self._now()

    def state_dict(self) -> dict[str, Any]:
        """Return the count of steps, the anchor and the outer optimizer's state: the same on all ranks."""
        anchor = {name: there for (name, _), there in zip(self.named, self.anchor, strict=True)}
        return {**super().state_dict(), "anchor": anchor, "outer": self.outer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where a job stopped; load the model's own parameters as usual. Every rank loads the same state.

        Args:
            state: A result of `state_dict` of any rank.

        Raises:
            ValueError: The state is of a model with other parameters, or of another outer optimizer.
        """
        anchor = state["anchor"]
        found = {name: tuple(t.shape) for name, t in anchor.items()}
        wanted = {name: tuple(t.shape) for name, t in self.named}
        if found != wanted:
            name = next(n for n in {**wanted, **found} if found.get(n) != wanted.get(n))
            raise ValueError(
                f"the state is of another model: {name!r} has shape {found.get(name)} in it, {wanted.get(name)} here"
            )
        # The optimizer refuses what does not fit before it changes anything.
        self.outer.load_state_dict(state["outer"])
        super().load_state_dict(state)
        with torch.no_grad():
            for (name, _), there in zip(self.named, self.anchor, strict=True):
                there.copy_(anchor[name])

    def _act(self) -> None:
        changes = [there - here.detach() for there, here in zip(self.anchor, self.tensors, strict=True)]
        over_buckets(changes, self._cap, lambda flat: self._comm.all_reduce(flat, "avg"))
        for there, change in zip(self.anchor, changes, strict=True):
            there.grad = change
        self.outer.step()
        for there, here in zip(self.anchor, self.tensors, strict=True):
            there.grad = None
            here.copy_(there)
