"""A communicator that can be replaced after a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from unisono.communicator import Communicator, engine_of
from unisono.errors import CommError
from unisono.utils.repeatable_barrier import RepeatableBarrier

__all__ = ["ReplaceableComms"]


class ReplaceableComms:
    """A communicator for training steps, and the communicator from which it is recreated after a failure.

    If a rank fails in the middle of a training step, it aborts the communicator in use. As a result, no other rank
    waits for the failed rank, and no message of the failed step can match a message of the next step. All ranks replace
    the communicator before they continue. Calls that must survive a failed step on another rank use `base`.

    Args:
        comm: Communicator of the ranks. Construction is collective.
        deterministic: Whether sums are reduced in a fixed order. If False, the setting of `comm` applies.
        options: Options of `Communicator.dup` for the communicator in use.

    Attributes:
        base: The original communicator, aborted only by `abort_all`.
        data: The communicator in use.
        rank, size: This rank, and the number of ranks.

    Example:
        >>> from unisono.utils.replaceable_comms import ReplaceableComms
        >>> def program(comm):
        ...     comms = ReplaceableComms(comm)
        ...     if comm.rank == 0:
        ...         comms.abort("the step failed here")
        ...     try:
        ...         comms.data.barrier()
        ...     except un.errors.AbortedError:
        ...         comms.replace()
        ...     return comms.data.all_gather_object(comm.rank)
        >>> un.launch(program, 2, "thread")
        [[0, 1], [0, 1]]
    """

    def __init__(self, comm: Communicator, *, deterministic: bool = False, **options: Any) -> None:
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.base: Communicator = comm.dup(deterministic=deterministic or None)
        self.base.allow_any_thread()
        self._options = options
        self._barrier = RepeatableBarrier(self.base)
        self.data: Communicator = self.dup(**options)

    def dup(self, **options: Any) -> Communicator:
        """Create another communicator of the same ranks. Collective."""
        comm = self.base.dup(**options)
        # With a GPU, hooks run in autograd's threads, so allow every thread to use the communicator.
        comm.allow_any_thread()
        return comm

    def in_use(self) -> tuple[Communicator, ...]:
        """Return the communicators that are aborted if a training step fails."""
        return (self.data,)

    def every(self) -> tuple[Communicator, ...]:
        """Return the communicators in use, and the communicator from which they are recreated."""
        return self.base, *self.in_use()

    def aborts(self) -> dict[str, Callable[[str], None]]:
        """Return the groups in which a rank may wait for others, by name, each with a function that aborts it."""
        found = {engine_of(comm).group.name: comm.abort for comm in self.every()}
        return {**found, self._barrier.name: self._barrier.abort}

    def replace(self) -> None:
        """Replace `data`, which has failed. Collective. All ranks can call `replace` again after an `AbortedError`."""
        # A rank can be blocked in another model, waiting for ranks that wait for it here. Wait in a barrier first,
        # because a barrier can be aborted and repeated. An aborted `base` could not be replaced, so use it only after
        # all ranks have arrived.
        self._barrier.wait()
        self.data.close()
        self.data = self.dup(**self._options)

    def abort(self, reason: str) -> None:
        """Abort the running training step on all ranks."""
        self._abort(reason, (comm.abort for comm in self.in_use()))

    def abort_all(self, reason: str) -> None:
        """Abort the running training step and all later steps on all ranks."""
        self._abort(reason, self.aborts().values())

    @staticmethod
    def _abort(reason: str, aborts: Iterable[Callable[[str], None]]) -> None:
        # Ignore the loss of the control plane, of which the other ranks have already been notified.
        with suppress(CommError):
            for abort in aborts:
                abort(reason)

    def close(self) -> None:
        """Release all communicators. Idempotent."""
        self.base.close()
        self._barrier.close()
