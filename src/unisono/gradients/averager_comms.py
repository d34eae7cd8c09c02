"""The communicators of an averager, and their replacement after a failed pass."""

from __future__ import annotations

from contextlib import suppress
from threading import Thread

from unisono.communicator import Communicator
from unisono.core.types import Work
from unisono.errors import AbortedError, CommError
from unisono.utils.replaceable_comms import ReplaceableComms

__all__ = ["AveragerComms"]


class AveragerComms(ReplaceableComms):
    """Communicators of an averager, replaced after a pass that failed when part of it had been sent.

    Calls on `data` are not compared between ranks, so after such a pass a message could match another bucket's.
    When the averager becomes unusable, the communicator that these were derived from is also aborted.

    Args:
        comm: The ranks that average. Collective.
        deterministic: Whether sums are reduced in a fixed order; if not, as on `comm`.

    Attributes:
        control: Communicator for everything but the buckets.
    """

    def __init__(self, comm: Communicator, *, deterministic: bool = False) -> None:
        super().__init__(comm, deterministic=deterministic, check="off")
        self.control: Communicator = self.base
        self._aborting: Thread | None = None

    def ready(self) -> None:
        """Create `control`. Collective, so no rank's earlier operations are cut off when another rank aborts."""
        self.control = self.dup()

    def in_use(self) -> tuple[Communicator, ...]:
        return self.control, self.data

    def replace(self) -> None:
        """Replace communicators that a failed pass has aborted. Collective."""
        self.control.close()
        super().replace()
        self.control = self.dup()

    def abort_pass(self, reason: str, first: Work | None) -> None:
        """Abort the running pass on all ranks.

        Args:
            reason: For the other ranks' errors.
            first: Reduction of the pass's first bucket, if in progress. Until it ends, other ranks may still be in the
                previous pass, which has succeeded here and must not be aborted there.
        """
        error = self.data.exception()
        if error is not None and not isinstance(error, AbortedError):
            # A rank was lost or did not join, so more is broken than one pass.
            self.abort_all(f"averaging has failed there: {error}")
        elif first is None:
            self.abort(reason)
        else:
            self._aborting = Thread(target=self._abort_after, args=(first, reason), daemon=True)
            self._aborting.start()

    def _abort_after(self, first: Work, reason: str) -> None:
        with suppress(CommError):
            first.wait()
        self.abort(reason)

    def settle(self) -> None:
        """Wait until all ranks have reached their first bucket and begun to abort the last pass."""
        if self._aborting is not None:
            self._aborting.join()
            self._aborting = None
