"""Periodic check that ranks hold the same parameters, bit for bit, for the price of reading them once."""

from __future__ import annotations

from unisono.checkpoint.divergence import assert_equal_tensors
from unisono.communicator import Communicator
from unisono.gradients.periodic import Model, PeriodicAction, Schedule

__all__ = ["DivergenceGuard"]


class DivergenceGuard(PeriodicAction):
    """Check, every n-th step, that all ranks hold the same parameters, bit for bit.

    Averaged gradients and equal optimizers keep ranks equal; a forgotten broadcast, a seed, a parameter
    that is not averaged or a faulty memory does not. NaNs of the same bits are equal; 0.0 and -0.0 are
    not. Construction is collective, and so is each check.

    Args:
        model: A module, or its parameters.
        comm: The ranks that should be equal.
        every: 100, or an `every(...)`, or a function of the step's number (from 1).
        buffers: Also check a module's buffers. BatchNorm's differ, unless it is a `SyncBatchNorm`.

    Raises:
        MismatchError: From `step` and `check`, on every rank: which parameters differ, and on which ranks.
            Training may continue, for instance after `un.broadcast_parameters`.

    Cost: reads the parameters once (about 1 ns for 4 bytes on one core), and gathers 8 bytes a rank. A single
    changed parameter element is always detected; changes of several cancel out with probability 2**-32.

    Example:
        >>> from unisono.gradients.divergence_guard import DivergenceGuard
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
        when = f" after step {self.steps}" if self.steps else ""
        advice = "un.broadcast_parameters(model, comm) makes them equal"
        assert_equal_tensors(self.named, self._comm, f"parameters differ between ranks{when}", advice)
