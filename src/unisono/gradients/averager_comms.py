"""The communicators of an averager, and their replacement after a pass that failed."""

from __future__ import annotations

from contextlib import suppress
from threading import Thread

from unisono.communicator import Communicator
from unisono.core.types import Work
from unisono.errors import AbortedError, CommError
from unisono.utils.replaceable_comms import ReplaceableComms

__all__ = ["AveragerComms"]


class AveragerComms(ReplaceableComms):
    """Communicators of an averager: those in use are replaced after a pass that failed when a part of it had left.

    What travels over `data` is not compared between ranks, so after such a pass a message could meet one of another
    bucket. The origin is aborted too when the averager is of no more use.

    Args:
        comm: The ranks that average. Collective.
        deterministic: Whether sums are reduced in one fixed order; as for `comm` if not.

    Attributes:
        control: Communicator for everything but the buckets.
    """

    def __init__(self, comm: Communicator, *, deterministic: bool = False) -> None:
        super().__init__(comm, deterministic=deterministic, check="off")
        self.control: Communicator = self.base
        self._aborting: Thread | None = None

    def ready(self) -> None:
        """Create `control`. Collective. Earlier operations of any rank are not cut off by an abort on another rank."""
        self.control = self.dup()

    def in_use(self) -> tuple[Communicator, ...]:
        return self.control, self.data

    def replace(self) -> None:
        """Make new ones where a failed pass has aborted the old ones. Collective."""
        self.control.close()
        super().replace()
        self.control = self.dup()

    def abort_pass(self, reason: str, first: Work | None) -> None:
        """End the running pass on all ranks.

        Args:
            reason: For the other ranks' errors.
            first: The reduction of the pass's first bucket, if it is in progress. Until it ends, other ranks may be
                in the previous pass, which has succeeded here and must not be cut off there.
        """
        error = self.data.exception()
        if error is not None and not isinstance(error, AbortedError):
            # A rank was lost or did not join: more than the failure of one pass.
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
        """Wait until an abort of the last pass has begun on all ranks: they reach their first bucket before."""
        if self._aborting is not None:
            self._aborting.join()
            self._aborting = None
