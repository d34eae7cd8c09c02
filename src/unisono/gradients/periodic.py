"""Periodic actions on a model's parameters: schedule, tensors, and a dedicated communicator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, overload

import torch
from torch.utils.hooks import RemovableHandle

from unisono.communicator import Communicator, engine_of
from unisono.core.types import Timeout
from unisono.core.work import positive_timeout
from unisono.utils.parameters import Model, Named, agree_on_parameters, check_parameters, named_tensors

__all__ = [
    "PeriodicAction",
    "PeriodicSchedule",
    "Schedule",
    "TimedSchedule",
    "compare",
    "every",
    "schedule_of",
    "whole_number",
]

Schedule = Callable[[int], bool]
"""Predicate: whether ranks act after a given step. The result is the same on all ranks, and steps count from 1."""


def whole_number(name: str, value: object, least: int, of: str = "step") -> None:
    """Raise `TypeError` or `ValueError` unless an argument is an int of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number of {of}s, not {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least} {of}{'s' * (least != 1)}, not {value}")


@dataclass(frozen=True, slots=True)
class PeriodicSchedule:
    """Schedule that `every` returns: the first `warmup` steps, and then each n-th step, delayed by `offset` steps."""

    n: int
    warmup: int = 0
    offset: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        whole_number("every", self.n, 1)
        whole_number("warmup", self.warmup, 0)

    def __call__(self, step: int) -> bool:
        return step <= self.warmup or (step - self.warmup - self.offset) % self.n == 0


@dataclass(frozen=True, slots=True)
class TimedSchedule:
    """Schedule that `every` returns for a `timedelta`: all ranks exchange at the same times, regardless of their steps.

    Attributes:
        interval: Time from one exchange of all parameters to the next.
        max_lag: How long an exchange waits for a late rank; if None, the time between exchanges.
    """

    interval: timedelta
    max_lag: Timeout | None = None

    def __post_init__(self) -> None:
        positive_timeout(self.interval, "every")
        if self.max_lag is not None:
            positive_timeout(self.max_lag, "max_lag")


@overload
def every(n: int, *, warmup: int = 0) -> PeriodicSchedule: ...
@overload
def every(n: timedelta, *, max_lag: Timeout | None = None) -> TimedSchedule: ...
def every(n: int | timedelta, *, warmup: int = 0, max_lag: Timeout | None = None) -> PeriodicSchedule | TimedSchedule:
    """Return a schedule: each of the first `warmup` steps and then each n-th step, or a fixed time interval.

    Synchronizing at each step at first, and less often later, is known as post-local SGD (Lin, Stich, Patel, Jaggi:
    Don't use large mini-batches, use local SGD, 2020).

    Args:
        n: Number of steps from one action to the next, 1 or more; or a `timedelta`, which `PeriodicAverager` and
            `DiLoCo` accept for ranks that run at different speeds.
        warmup: Number of initial steps that all run the action, 0 or more. The first interval of `n` steps begins after
            the warm-up steps.
        max_lag: With a `timedelta`: how long an exchange waits for a late rank, in seconds or as a timedelta. An
            exchange that has waited for `max_lag` proceeds without the late rank's contribution; after its next step,
            the late rank continues from the ranks' common parameters (the anchor). Defaults to the time between
            exchanges.

    Raises:
        TypeError: `n` or `warmup` is not an int.
        ValueError: `n` is less than 1, or `warmup` less than 0; a time is not positive; `warmup` was passed with a
            `timedelta`, or `max_lag` without one.

    Example:
        >>> from unisono.gradients.periodic import every
        >>> [step for step in range(1, 13) if every(4)(step)]
        [4, 8, 12]
        >>> [step for step in range(1, 13) if every(4, warmup=3)(step)]
        [1, 2, 3, 7, 11]
    """
    if isinstance(n, timedelta):
        if warmup:
            raise ValueError("warmup= is a number of steps: it does not go with a timedelta")
        return TimedSchedule(n, max_lag)
    if max_lag is not None:
        raise ValueError("max_lag= is for ranks of different speed: it needs a timedelta")
    return PeriodicSchedule(n, warmup)


def compare(comm: Communicator, state: Mapping[str, object], owner: str) -> None:
    """Make this thread's next collective check that `state` is the same on all ranks.

    Args:
        comm: Communicator of the ranks to compare.
        state: Values that must be equal on all ranks, by name.
        owner: Class name for the error message.
    """
    if engine_of(comm).checked:
        comm.agree(state, f"an action of {owner}")


class PeriodicAction(ABC):
    """Action on a model's parameters, run after each step that a schedule selects. Construction is collective.

    Messages are sent over a dedicated communicator (`dup`), so that they never match the caller's messages.

    Args:
        model: A module, or its parameters, with or without names.
        comm: Communicator of the ranks that take part. All ranks need the same parameters, but values may differ.
        every: Number of steps between actions, a schedule returned by `every(...)`, or a function of the step's number.
        buffers: Whether to include a module's buffers.
        settings: Other values that must be the same on all ranks, by name.

    Raises:
        MismatchError: Raised on every rank: names, shapes, dtypes or arguments differ between ranks.

    Attributes:
        steps: Number of steps counted so far.
    """

    def __init__(
        self,
        model: Model,
        comm: Communicator,
        every: int | Schedule,
        *,
        buffers: bool = False,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self._schedule = schedule_of(every)
        named = named_tensors(model, buffers=buffers)
        check_parameters(named)
        self._model: Model = model if isinstance(model, torch.nn.Module) else named
        self._buffers = buffers
        self.steps: int = 0
        self._hook: RemovableHandle | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        when = repr(self._schedule) if isinstance(self._schedule, PeriodicSchedule) else "a function"
        self._settings = {"every": when, **(settings or {})}
        self._connect(comm)

    def _connect(self, comm: Communicator) -> None:
        """Check that the ranks of a communicator agree, and duplicate it. Collective."""
        agree_on_parameters(self.named, comm, self._settings, of=type(self).__name__, frozen=False)
        self._comm = comm.dup()

    @property
    def named(self) -> Named:
        """The current tensors with their names; the module may have replaced tensors since construction."""
        return named_tensors(self._model, buffers=self._buffers)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The current tensors, without names."""
        return [tensor for _, tensor in self.named]

    @abstractmethod
    def _act(self) -> None:
        """Run the action. Collective; called under `no_grad` after each step that the schedule selects."""

    def step(self) -> bool:
        """Count a step, and run the action if it is due. Call `step` after each `optimizer.step()`.

        Collective when the action is due.

        Returns: Whether the action ran.

        Raises:
            ValueError: `LocalSGD` only: average_state=True without an attached optimizer.
        """
        self.steps += 1
        due = self._schedule(self.steps)
        if due:
            self._now()
        return due

    def attach(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Call `step` automatically after each step of an optimizer.

        Don't use `attach` if a single rank may skip a step, as with `GradScaler`: call `step` yourself instead.

        Args:
            optimizer: The optimizer of this rank's parameters.

        Returns: A handle; its `remove()` detaches the optimizer, as `close` does.

        Raises:
            ValueError: An optimizer is attached already.
        """
        if self._hook is not None and self._hook.id in (self._hook.hooks_dict_ref() or ()):
            raise ValueError("an optimizer is attached already; remove() the handle that attach returned first")

        def hook(*_: object) -> None:
            self.step()

        self._hook = optimizer.register_step_post_hook(hook)
        self._optimizer = optimizer
        return self._hook

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from. As in a module's state dict, tensors are not copied."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state. Every rank loads the same state.

        Args:
            state: Result of `state_dict` on any rank.
        """
        self.steps = int(state["steps"])

    def move_to(self, comm: Communicator) -> None:
        """Switch to the ranks of another communicator, such as the result of `comm.rebuild()`.

        Collective over the new communicator: ranks that join create their object at the same time.

        Args:
            comm: The new communicator.

        Raises:
            MismatchError: Ranks have different parameters or arguments.
        """
        self._disconnect()
        self._connect(comm)

    def _disconnect(self) -> None:
        """Abort all collectives on the old communicator, because some of its ranks may be lost."""
        self._comm.abort(f"{type(self).__name__} moves to other ranks")
        self._comm.close()

    def close(self) -> None:
        """Release the communicator, and detach the optimizer. Every rank must call `close`. Idempotent."""
        self._detach()
        self._comm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._detach()
        self._comm.__exit__(kind, error, trace)

    def __getstate__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} communicates with other ranks, so it can be neither pickled nor copied. Save and "
            "load its state_dict(), or create a new one on all ranks"
        )

    def _now(self) -> None:
        with torch.no_grad():
            self._act()

    def _detach(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._optimizer = None


def schedule_of(given: int | Schedule) -> Schedule:
    """Return the schedule for a number of steps; a schedule is returned unchanged."""
    return given if callable(given) else PeriodicSchedule(given)
