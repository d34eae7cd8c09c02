"""Local SGD and DiLoCo: ranks train independently, and average periodically."""

from __future__ import annotations

from datetime import timedelta

import torch
from typing_extensions import Unpack

from unisono.communicator import Communicator
from unisono.compression.codec import Spec
from unisono.gradients.anchor import Outer, OuterUpdate
from unisono.gradients.exchange import Fragment
from unisono.gradients.periodic import Schedule, TimedSchedule
from unisono.gradients.periodic_averager import ExchangeOptions, PeriodicAverager, floating
from unisono.utils.parameters import Model, agree_on_parameters

__all__ = ["DiLoCo", "LocalSGD", "SlowMo"]


class LocalSGD(PeriodicAverager):
    """Local SGD: average the parameters over ranks every n-th step, instead of the gradients at each step.

    Provisional: it may change in any minor version, without a deprecation.

    Method: Stich, Local SGD converges fast and communicates little (2019). After averaging, all ranks are bitwise
    identical. Construction is collective, and so is each `step` that averages.

    Args:
        model: A module, or its parameters; frozen parameters are averaged as well, so leave them out if there are many.
            Integer parameters remain unchanged.
        comm: Communicator of the ranks whose parameters are averaged.
        every: Number of steps between averages, a schedule such as `every(8, warmup=100)`, or a function of the step's
            number (from 1).
        buffers: Also average a module's floating-point buffers, such as the statistics of BatchNorm.
        average_state: Also average optimizer state that has the shape of its parameter (momentum, Adam's moments).
            Requires `attach`.
        bucket_cap_mb: Maximum message size in MiB.

    Raises:
        MismatchError: Ranks have different parameters or arguments, or optimizers in different states.
        ValueError: `every` is less than 1.

    Cost: one all_reduce of the parameters every n-th step; nothing in between.

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
        self._more_settings = {"average_state": average_state}
        super().__init__(model, comm, every, buffers=buffers, bucket_cap_mb=bucket_cap_mb)

    def step(self, samples: int | None = None) -> bool:
        if self._average_state and self._optimizer is None:
            raise ValueError("average_state=True needs the optimizer: call attach(optimizer) first")
        return super().step(samples)

    def average(self) -> None:
        """Average now, regardless of the schedule, for example at the end of training. Collective."""
        self._now()

    def _tensors(self, fragment: Fragment) -> list[torch.Tensor]:
        tensors = super()._tensors(fragment)
        if self._average_state:
            kept = self._optimizer.state if self._optimizer is not None else {}
            state = floating(
                [
                    (f"{name}.{key}", value)
                    for name, parameter in self.named
                    for key, value in sorted(kept.get(parameter, {}).items())
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape
                ]
            )
            # Compare the state's names and shapes: optimizers create state at a parameter's first gradient, which may
            # arrive on only some ranks.
            agree_on_parameters(state, self._comm, of="the optimizer's state", frozen=False)
            tensors += [tensor for _, tensor in state]
        return tensors


class DiLoCo(PeriodicAverager):
    """Local training; every n-th step, an outer optimizer uses the ranks' mean parameter change as its gradient.

    Provisional: it may change in any minor version, without a deprecation.

    Ranks start from a common anchor, train independently for n steps, and average the difference `anchor - parameters`.
    The outer optimizer (SGD with Nesterov momentum) uses that average as the gradient of the anchor, and all ranks
    continue from the updated anchor. Method: Douillard et al., DiLoCo, distributed low-communication training of
    language models (2023). After each outer step, all ranks are bitwise identical. The inner optimizer and its state
    are local to each rank. Construction is collective, and so is each `step` that runs the outer optimizer.

    Args:
        model: A module, or its parameters, equal on all ranks. Integer parameters remain unchanged.
        comm: Communicator of the ranks that train.
        every: Number of steps between outer steps, an `every(...)`, or a function of the step's number (from 1). If
            ranks run at different speeds, pass a `timedelta`, or `every(timedelta(...), max_lag=...)` (see
            `PeriodicAverager`).
        outer_lr, outer_momentum, nesterov: Settings of the outer SGD.
        outer: Function that takes the anchor's tensors and returns another outer optimizer; overrides the three
            settings above.
        compression, anchor_dtype: As for `OuterUpdate`.
        options: Options of `PeriodicAverager`: `fragments`, `reduce`, `overlap_steps`, `alpha`, `bucket_cap_mb`. For
            Streaming DiLoCo (Douillard et al., 2025), pass, for instance, `every=100, fragments=4, overlap_steps=5,
            alpha=0.5, compression="int4"`.

    Raises:
        MismatchError: Ranks have different arguments or parameters (including values: see `un.broadcast_parameters`).
        ValueError: `every` is less than 1, or `PeriodicAverager` or the outer optimizer rejects an option.

    Attributes:
        anchor: The value of each parameter when all ranks last had equal parameters, in float32 or a wider dtype.
        outer: The outer optimizer; its learning rate may be scheduled like any other.

    Cost: one all_reduce of the anchor every n-th step. Memory: two more copies of the parameters (anchor and momentum),
    and a third while the outer optimizer steps.

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
        every: int | Schedule | timedelta | TimedSchedule = 50,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        *,
        outer: Outer | None = None,
        compression: Spec | None = None,
        anchor_dtype: torch.dtype | None = None,
        **options: Unpack[ExchangeOptions],
    ) -> None:
        def sgd(anchor: list[torch.Tensor]) -> torch.optim.Optimizer:
            return torch.optim.SGD(anchor, lr=outer_lr, momentum=outer_momentum, nesterov=nesterov)

        super().__init__(model, comm, every, outer=OuterUpdate(outer or sgd, anchor_dtype, compression), **options)

    def outer_step(self) -> None:
        """Step the outer optimizer now, regardless of the schedule. Collective.

        Momentum is applied as if a whole interval had passed, so a call soon after another outer step moves the anchor
        too far.

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


class SlowMo(torch.optim.Optimizer):
    """Outer optimizer of SlowMo, with momentum in units of gradients, so that the inner learning rate may vary.

    Provisional: it may change in any minor version, without a deprecation.

    With a constant inner learning rate, SlowMo equals `DiLoCo`'s SGD without Nesterov momentum. Method: Wang, Tantia,
    Ballas, Rabbat: SlowMo, improving communication-efficient distributed SGD with slow momentum (2020).

    Args:
        anchor: The anchor's tensors, which the optimizer updates.
        inner: The inner optimizer; each outer step uses the learning rate of its first group.
        lr: The slow learning rate, alpha in the paper.
        momentum: The slow momentum, beta in the paper.

    Example:
        >>> def program(comm):
        ...     w = torch.zeros(1, requires_grad=True)
        ...     inner = torch.optim.SGD([w], lr=0.5)
        ...     make = lambda anchor: un.gradients.SlowMo(anchor, inner, lr=1.0, momentum=0.5)
        ...     slow = un.gradients.DiLoCo([w], comm, every=1, outer=make)
        ...     for _ in range(2):
        ...         w.grad = torch.ones(1)
        ...         inner.step()
        ...         slow.step()
        ...     return w.item()
        >>> un.launch(program, 2, "thread")
        [-1.25, -1.25]
    """

    def __init__(
        self, anchor: list[torch.Tensor], inner: torch.optim.Optimizer, lr: float = 1.0, momentum: float = 0.5
    ) -> None:
        super().__init__(anchor, {"lr": lr, "momentum": momentum})
        self._inner = inner

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # SlowMo needs no loss closure
        """Step the anchor.

        Args:
            closure: Not used.

        Raises:
            ValueError: The inner learning rate is 0, so changes cannot be converted to gradients.
        """
        fast = float(self._inner.param_groups[0]["lr"])
        if not fast:
            raise ValueError("the inner learning rate is 0: SlowMo divides changes by it")
        for group in self.param_groups:
            for there in group["params"]:
                if there.grad is not None:
                    slow = self.state[there].setdefault("momentum_buffer", torch.zeros_like(there))
                    slow.mul_(group["momentum"]).add_(there.grad, alpha=1 / fast)
                    there.sub_(slow, alpha=group["lr"] * fast)
