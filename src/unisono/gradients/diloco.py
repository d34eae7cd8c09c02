"""DiLoCo: many steps on each rank alone, then one step of an outer optimizer on what all have learnt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unisono.checkpoint.divergence import assert_equal_tensors
from unisono.communicator import Communicator
from unisono.gradients.periodic import Model, PeriodicAction, Schedule, named_tensors, over_buckets
from unisono.utils.bucket_plan import check_parameters

__all__ = ["DiLoCo"]

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
        >>> from unisono.gradients.diloco import DiLoCo
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
        facts = [("outer", made), ("bucket_cap_mb", str(bucket_cap_mb))]
        super().__init__(named, comm, every, facts=facts)
        try:
            advice = "un.broadcast_parameters(model, comm) makes them equal"
            assert_equal_tensors(named, self._comm, "parameters differ between ranks", advice)
        except Exception:
            # Whatever it was is raised again; the line that was opened must not stay open.
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
        ways = [there - here.detach() for there, here in zip(self.anchor, self.tensors, strict=True)]
        over_buckets(ways, self._cap, lambda flat: self._comm.all_reduce(flat, "avg"))
        for there, way in zip(self.anchor, ways, strict=True):
            there.grad = way
        self.outer.step()
        for there, here in zip(self.anchor, self.tensors, strict=True):
            there.grad = None
            here.copy_(there)
