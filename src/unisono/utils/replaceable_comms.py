"""A communicator in use, which is replaced after a failure."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from unisono.communicator import Communicator
from unisono.errors import CommError

__all__ = ["ReplaceableComms"]


class ReplaceableComms:
    """A communicator in use, and one from which it is made again.

    A rank that fails in the middle of a step aborts the one in use, so that no other rank waits for it, and no message
    of that step meets one of the next. All ranks replace it before they go on. What must not be cut off by a step that
    fails on another rank goes over `base`.

    Args:
        comm: The ranks that communicate. Collective.
        deterministic: Whether sums are reduced in one fixed order; as for `comm` if not.
        options: As for `Communicator.dup`, for the communicator in use.

    Attributes:
        base: The origin, which only `abort_all` aborts.
        data: The communicator in use.
        rank, size: Of this rank.

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
        self.data: Communicator = self.dup(**options)

    def dup(self, **options: Any) -> Communicator:
        """Make another communicator of these ranks. Collective."""
        comm = self.base.dup(**options)
        # Where there is a GPU, hooks run in threads of autograd.
        comm.allow_any_thread()
        return comm

    def in_use(self) -> tuple[Communicator, ...]:
        """Return what a failed step aborts."""
        return (self.data,)

    def replace(self) -> None:
        """Make a new communicator instead of the one in use, which has failed. Collective."""
        self.data.close()
        self.data = self.dup(**self._options)

    def abort(self, reason: str) -> None:
        """End the running step on all ranks."""
        self._abort(reason, *self.in_use())

    def abort_all(self, reason: str) -> None:
        """End the running step and all later ones on all ranks."""
        self._abort(reason, self.base, *self.in_use())

    @staticmethod
    def _abort(reason: str, *comms: Communicator) -> None:
        # If the control plane is gone, it has notified the other ranks already.
        with suppress(CommError):
            for comm in comms:
                comm.abort(reason)

    def close(self) -> None:
        """Release all. Idempotent."""
        self.base.close()
