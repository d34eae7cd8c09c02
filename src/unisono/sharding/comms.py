"""The communicator of one sharded model, and its replacement after a failure."""

from __future__ import annotations

from contextlib import suppress

from unisono.communicator import Communicator
from unisono.errors import CommError

__all__ = ["NO_COPY", "ShardComms"]

NO_COPY = (
    "what is sharded communicates with other ranks, so it can be neither pickled nor copied. Save and load its "
    "state_dict(), or create a new one on all ranks"
)


class ShardComms:
    """A communicator in use, and one from which it is made again.

    A rank that fails in the middle of a step aborts the one in use, so that no other rank waits for it. All ranks
    replace it at the beginning of their next step. Another rank may still be in the optimizer's step before, or create
    its optimizer: what makes a step final on all ranks, and creation, therefore go over `steps`, which no failed pass
    aborts.

    Args:
        comm: The ranks that share the model. Collective.

    Attributes:
        data: The communicator in use.
        steps: The other one.
        rank, size: Of this rank.
    """

    def __init__(self, comm: Communicator) -> None:
        self._attach(comm)

    def _attach(self, comm: Communicator) -> None:
        self.steps = comm.dup()
        self.steps.allow_any_thread()
        self.rank = comm.rank
        self.size = comm.size
        self.data = self._dup()

    def _dup(self) -> Communicator:
        data = self.steps.dup()
        # Where there is a GPU, hooks run in threads of autograd.
        data.allow_any_thread()
        return data

    def abort(self, reason: str) -> None:
        """End the running step on all ranks."""
        self._abort(reason, self.data)

    def abort_all(self, reason: str) -> None:
        """End the running step and all later ones on all ranks."""
        self._abort(reason, self.steps, self.data)

    def fail_step(self, error: BaseException) -> None:
        """End all on all ranks: an optimizer has raised this error here, when others may have updated their parts."""
        self.abort_all(
            f"optimizer.step() failed there: {type(error).__name__}: {error}. Ranks may have made different steps: "
            "load a checkpoint into new objects"
        )

    def _abort(self, reason: str, *comms: Communicator) -> None:
        # If the control plane is gone, it has notified the other ranks already.
        with suppress(CommError):
            for comm in comms:
                comm.abort(reason)

    def replace(self) -> bool:
        """Make a new communicator where the one in use has failed. Collective then. Return whether it has."""
        failed = self.data.exception() is not None
        if failed:
            self.data.close()
            self.data = self._dup()
        return failed

    def move_to(self, comm: Communicator) -> None:
        """Continue with the ranks of another communicator. Collective over it."""
        self.close()
        self._attach(comm)

    def close(self) -> None:
        """Release all. Idempotent."""
        self.steps.close()
