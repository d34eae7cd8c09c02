"""Guards: detect NaNs before averaging spreads them to all ranks, and check periodically that ranks are equal."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from unisono.comm.equal_tensors import assert_equal_tensors
from unisono.communicator import Communicator
from unisono.errors import NotFiniteError
from unisono.gradients.parameter_registry import hook_forward, hook_gradient
from unisono.gradients.periodic import PeriodicAction, Schedule, compare, schedule_of
from unisono.utils.parameters import Model, ModelMembers, agree_on_parameters, named_tensors

__all__ = ["DivergenceGuard", "NanGuard", "agree_step", "assert_finite"]

_FLUSH_EVERY = 100
"""Number of steps after which pending values are compared if no collective has compared them."""


class NanGuard:
    """Detector of NaN or infinite gradients during the backward pass, before any averaging.

    Averaging spreads one rank's NaN to all ranks, which hides its origin. The guard inspects each gradient before it is
    added to `p.grad`, so it works together with `GradientAverager`'s hooks. Construction is collective, and so is
    `check`, which you call after `backward()`.

    Parameters of a module that are unfrozen, replaced or added later are hooked before the next forward. For a gradient
    that no hook has seen, `check` inspects `p.grad`.

    Args:
        model: A module, its parameters, or its named parameters. In a list, parameters that are unfrozen later are
            detected, but replaced or added parameters are not.
        comm: Communicator of the ranks to compare.

    Raises:
        MismatchError: Ranks have different parameters.

    Cost: one pass over each gradient (about 0.3 ns per float32 on one core); before each forward, 0.1 us per parameter;
    `check` gathers 16 bytes per rank. Memory: 8 bytes per parameter.

    Example:
        >>> from unisono.gradients import NanGuard
        >>> def program(comm):
        ...     model = torch.nn.Linear(2, 1)
        ...     guard = NanGuard(model, comm)
        ...     x = torch.tensor([[1.0, float("nan") if comm.rank == 2 else 1.0]])
        ...     model(x).sum().backward()
        ...     guard.check()
        >>> un.launch(program, 3, "thread")
        Traceback (most recent call last):
        ...
        unisono.errors.NotFiniteError: ...rank 2 has 1 of 2 elements that are not finite in the gradient of 'weight'...
    """

    def __init__(self, model: Model, comm: Communicator) -> None:
        self._comm = comm
        named = named_tensors(model)
        agree_on_parameters(named, comm, of="NanGuard", frozen=False)
        self._model: Model = model if isinstance(model, torch.nn.Module) else named
        # For each parameter name, in the order in which gradients arrived: the gradient's size, and the largest number
        # of non-finite elements that it had in any backward pass.
        self._seen: dict[str, tuple[int, torch.Tensor]] = {}
        self._hooks: list[RemovableHandle] = []
        self._follow()
        self._forward = hook_forward(model, self._before_forward)

    def _before_forward(self, *_: object) -> None:
        if self._members.problem() is not None:
            self._follow()

    def _follow(self) -> None:
        """Hook the model's current parameters."""
        for hook in self._hooks:
            hook.remove()
        named = named_tensors(self._model)
        self._hooks = [hook_gradient(parameter, partial(self._look, name)) for name, parameter in named]
        # Identify parameters by `_cdata`, because hooks belong to a parameter's C++ tensor object, which
        # `torch.utils.swap_tensors` swaps.
        self._hooked = {parameter._cdata for _, parameter in named}
        self._members = ModelMembers(self._model, named)

    def _look(self, name: str, gradient: torch.Tensor) -> None:
        with torch.no_grad():
            count = _count(gradient)
            _, before = self._seen.get(name, (0, count))
            self._seen[name] = gradient.numel(), torch.maximum(before, count)

    def check(self) -> None:
        """Raise on all ranks if any rank has seen a NaN or an infinity since the last check. Collective.

        Raises:
            NotFiniteError: Raised on every rank. The error names the first affected rank (which is also its `peer`),
                and the parameter whose gradient was affected.
        """
        # A parameter that was added after the last call of the whole model's `forward` has no hook yet, so inspect its
        # p.grad.
        new = [(name, p) for name, p in named_tensors(self._model) if p._cdata not in self._hooked]
        for name, parameter in new:
            if parameter.grad is not None:
                self._look(name, parameter.grad)
        if new:
            self._follow()
        seen = self._seen
        self._seen = {}
        _raise_if_any(self._comm, [(name, *found) for name, found in seen.items()], "the gradient of ")

    def remove(self) -> None:
        """Remove the hooks from the model. Idempotent."""
        for hook in (*self._hooks, self._forward):
            hook.remove()


def assert_finite(model: Model, comm: Communicator, *, buffers: bool = False) -> None:
    """Raise `NotFiniteError` on every rank if a parameter contains a NaN or an infinity on any rank. Collective.

    Args:
        model: A module, or its parameters, or its named parameters.
        comm: Communicator of the ranks to compare.
        buffers: Also check a module's buffers.

    Raises:
        NotFiniteError: Names the first affected rank, and its first affected parameter.
        MismatchError: Ranks have different models.

    Example:
        >>> from unisono.gradients import assert_finite
        >>> un.launch(lambda comm: assert_finite(torch.nn.Linear(2, 1), comm), 2, "thread")
        [None, None]
    """
    named = named_tensors(model, buffers=buffers)
    agree_on_parameters(named, comm, of="assert_finite", frozen=False)
    with torch.no_grad():
        _raise_if_any(comm, [(name, t.numel(), _count(t)) for name, t in named], "")


def _count(tensor: torch.Tensor) -> torch.Tensor:
    """Count the elements that are not finite, without synchronizing with the device."""
    values = tensor.detach()
    if values.layout != torch.strided:
        values = values.coalesce().values()
    return values.numel() - torch.isfinite(values).sum()


def _raise_if_any(comm: Communicator, found: Sequence[tuple[str, int, torch.Tensor]], of: str) -> None:
    counts = torch.stack([count for _, _, count in found]).tolist() if found else []
    name, size, count = next(
        ((name, size, count) for (name, size, _), count in zip(found, counts, strict=True) if count), ("", 0, 0)
    )
    table = torch.empty(2 * comm.size, dtype=torch.int64, device=comm.device)
    comm.all_gather_single(table, torch.tensor((count, size), dtype=torch.int64, device=comm.device))
    rows = table.view(comm.size, 2).tolist()
    bad = [rank for rank, (count, _) in enumerate(rows) if count]
    if not bad:
        return
    count, size = rows[bad[0]]
    # Send the name, not an index, because a rank may have parameters that other ranks lack.
    name = comm.broadcast_object(name, bad[0])
    others = f"; so {'has rank' if len(bad) == 2 else 'have ranks'} {', '.join(map(str, bad[1:]))}" if bad[1:] else ""
    raise NotFiniteError(
        f"rank {bad[0]} has {count} of {size} elements that are not finite in {of}{name!r}, the first such"
        f"{' in its backward pass' if of else ''}{others}. Look at its data, the learning rate and the loss's scale",
        rank=comm.rank,
        size=comm.size,
        peer=bad[0],
    )


class DivergenceGuard(PeriodicAction):
    """Check every n-th step that all ranks have bitwise identical parameters.

    Averaged gradients and equal optimizers keep ranks equal; a forgotten broadcast, a different seed, a parameter that
    is not averaged, or faulty memory makes them diverge. NaNs with the same bits are equal; 0.0 and -0.0 are not.
    Construction is collective, and so is each check.

    Args:
        model: A module, or its parameters.
        comm: Communicator of the ranks to compare.
        every: Number of steps between checks, a schedule returned by `every(...)`, or a function of the step's number
            (from 1).
        buffers: Also check a module's buffers. BatchNorm's buffers differ between ranks, unless you use
            `SyncBatchNorm`.

    Raises:
        MismatchError: Raised by `step` and `check` on every rank; the message says which parameters differ, and on
            which ranks. Training may continue, for example after `un.broadcast_parameters`.

    Cost: reads the parameters once (about 1 ns per 4 bytes on one core), and gathers 8 bytes per rank. A single changed
    parameter element is always detected; changes of several elements cancel out with probability 2**-32.

    Example:
        >>> from unisono.gradients.guards import DivergenceGuard
        >>> def program(comm):
        ...     model = torch.nn.Linear(2, 1)
        ...     un.broadcast_parameters(model, comm)
        ...     guard = DivergenceGuard(model, comm, every=1)
        ...     guard.step()
        ...     with torch.no_grad():
        ...         model.bias += 0.5 * (comm.rank == 2)
        ...     guard.step()
        >>> un.launch(program, 3, "thread")
        Traceback (most recent call last):
        ...
        unisono.errors.MismatchError: ...'bias': rank 2 differs from ranks 0, 1 (by up to 0.5)...
    """

    def __init__(self, model: Model, comm: Communicator, every: int | Schedule = 100, *, buffers: bool = False) -> None:
        super().__init__(model, comm, every, buffers=buffers)

    def check(self) -> None:
        """Check now, regardless of the schedule. Collective."""
        self._now()

    def _act(self) -> None:
        compare(self._comm, {"steps": self.steps}, type(self).__name__)
        when = f" after step {self.steps}" if self.steps else ""
        advice = "un.broadcast_parameters(model, comm) makes them equal"
        assert_equal_tensors(self.named, self._comm, f"parameters differ between ranks{when}", advice)


def agree_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator, *, every: int | Schedule = 1
) -> RemovableHandle:
    """Compare the model, optimizer state and options of all ranks after every n-th optimizer step.

    This function uses `Communicator.agree`: the values are compared in the next collective of the thread that runs the
    optimizer, without an extra message. Every 100 steps, it also compares values that no collective has compared yet,
    for example because an averager communicates in its own thread. All ranks must call `agree_step` after the same
    number of optimizer steps.

    Args:
        model: Unsharded module whose parameters and buffers should be the same on all ranks.
        optimizer: Unsharded optimizer whose state and options, such as the learning rate, should be the same on all
            ranks.
        comm: Communicator of the ranks to compare.
        every: Number of steps between comparisons, a schedule returned by `every(...)`, or a function of the step's
            number, which counts from 1.

    Returns: A handle; its `remove()` ends the comparison.

    Raises:
        TypeError, ValueError: `every` is not a number of steps.
        MismatchError: Raised on every rank by the collective that compares the values. The error names the first value
            that differs, and the ranks that have each variant; or a rank that has taken a different number of steps.

    Cost: a hash of all values (about 1 ns per 4 bytes on one core) for each comparison; every 100 steps, a barrier and
    a round trip to the control plane.

    Example:
        >>> def program(comm):
        ...     model = torch.nn.Linear(2, 1)
        ...     un.broadcast_parameters(model, comm)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if comm.rank < 2 else 0.2)
        ...     un.agree_step(model, optimizer, comm)
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     un.average_gradients(model, comm)
        ...     optimizer.step()
        ...     comm.barrier()
        >>> un.launch(program, 3, "thread")
        Traceback (most recent call last):
        ...
        unisono.errors.MismatchError: ...'the optimizer after step 1', at ['param_groups'][0]['lr']: ranks 0, 1: 0.1...
    """
    schedule = schedule_of(every)
    steps = itertools.count(1)

    def hook(*_: object) -> None:
        step = next(steps)
        if schedule(step):
            # Compare the optimizer first, so that the error names the cause: different options make parameters differ,
            # but different parameters do not change options.
            comm.agree(optimizer, f"the optimizer after step {step}")
            comm.agree(model, f"the model after step {step}")
        if step % _FLUSH_EVERY == 0:
            comm.flush_agreements()

    return optimizer.register_step_post_hook(hook)
