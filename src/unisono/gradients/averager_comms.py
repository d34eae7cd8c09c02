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
    """Communicators of an averager, which are replaced if a backward pass fails after some gradients were sent.

    Collectives on `data` are not checked across ranks, so after a failed pass one bucket's message could be matched
    with another bucket's message. When the averager becomes unusable, the communicator that it was created from is also
    aborted.

    Args:
        comm: Communicator of the ranks whose gradients are averaged. Construction is collective.
        deterministic: Whether sums are reduced in a fixed order. If False, the setting of `comm` applies.

    Attributes:
        control: Communicator for everything except reducing the buckets.
    """

    def __init__(self, comm: Communicator, *, deterministic: bool = False) -> None:
        super().__init__(comm, deterministic=deterministic, check="off")
        self.control: Communicator = self.base
        self._aborting: Thread | None = None

    def ready(self) -> None:
        """Create `control`. Collective, so that all ranks finish their earlier operations before any rank can abort."""
        self.control = self.dup()

    def in_use(self) -> tuple[Communicator, ...]:
        return self.control, self.data

    def replace(self) -> None:
        """Replace the communicators after a failed backward pass has aborted them. Collective."""
        super().replace()
        self.control.close()
        self.control = self.dup()

    def abort_pass(self, reason: str, first: Work | None) -> None:
        """Abort the current backward pass on all ranks.

        Args:
            reason: Text for the other ranks' errors.
            first: Reduction of the pass's first bucket, if it is in flight. Until the first bucket is reduced, other
                ranks may still be in the previous pass. That pass must not be aborted, because it has succeeded on this
                rank.
        """
        error = self.data.exception()
        if error is not None and not isinstance(error, AbortedError):
            # A rank was lost or did not take part, so later backward passes would also fail.
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
        """If `abort_pass` had to delay the abort of the last pass, wait until the abort has been issued."""
        if self._aborting is not None:
            self._aborting.join()
            self._aborting = None
