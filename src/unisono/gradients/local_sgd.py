"""Local SGD: ranks train independently, and periodically average their parameters."""

from __future__ import annotations

import torch

from unisono.communicator import Communicator
from unisono.gradients.periodic import Model, PeriodicAction, Schedule, agree, described, over_buckets

__all__ = ["LocalSGD"]


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
        facts = [("average_state", str(average_state)), ("bucket_cap_mb", str(bucket_cap_mb))]
        super().__init__(model, comm, every, buffers=buffers, facts=facts)

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
            agree(self._comm, "LocalSGD, state of the optimizer", described(state))
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
