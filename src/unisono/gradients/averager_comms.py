"""The communicators of one averager, and how a pass that failed half-way ends on all ranks."""

from __future__ import annotations

from contextlib import suppress
from threading import Thread
from typing import Any

from unisono.communicator import Communicator
from unisono.core.types import Work
from unisono.errors import AbortedError, CommError

__all__ = ["AveragerComms"]


class AveragerComms:
    """Two communicators in use, and one from which they are made again.

    What travels over `data` is not compared between ranks. So after a pass that failed when a part of it had left, a
    message could meet one of another bucket. Such a pass aborts both, and the next one makes them again. Their origin
    is aborted too when the averager is of no more use.

    Args:
        comm: The ranks that average. Collective.
        deterministic: Whether sums are reduced in one fixed order; as for `comm` if not.

    Attributes:
        data: Communicator for buckets: calls are not checked.
        control: Communicator for everything else.
    """

    def __init__(self, comm: Communicator, *, deterministic: bool = False) -> None:
        self._base = comm.dup(deterministic=deterministic or None)
        self._base.allow_any_thread()
        self.data = self._dup(check="off")
        self.control = self._base
        self._aborting: Thread | None = None

    def ready(self) -> None:
        """Create `control`. Collective. Earlier operations of any rank are not cut off by an abort on another rank."""
        self.control = self._dup()

    def _dup(self, **options: Any) -> Communicator:
        comm = self._base.dup(**options)
        # Where there is a GPU, hooks run in threads of autograd.
        comm.allow_any_thread()
        return comm

    def replace(self) -> None:
        """Make new ones where a failed pass has aborted the old ones. Collective."""
        self.control.close()
        self.data.close()
        self.data = self._dup(check="off")
        self.control = self._dup()

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
            self.abort(f"averaging has failed there: {error}")
        elif first is None:
            self._abort(reason, self.control, self.data)
        else:
            self._aborting = Thread(target=self._abort_after, args=(first, reason), daemon=True)
            self._aborting.start()

    def _abort_after(self, first: Work, reason: str) -> None:
        with suppress(CommError):
            first.wait()
        self._abort(reason, self.control, self.data)

    def settle(self) -> None:
        """Wait until an abort of the last pass has begun on all ranks: they reach their first bucket before."""
        if self._aborting is not None:
            self._aborting.join()
            self._aborting = None

    def abort(self, reason: str) -> None:
        """End every pass on all ranks, for good."""
        self._abort(reason, self._base, self.control, self.data)

    def _abort(self, reason: str, *comms: Communicator) -> None:
        # If the control plane is gone, it has notified the other ranks already.
        with suppress(CommError):
            for comm in comms:
                comm.abort(reason)

    def close(self) -> None:
        """Release all. Idempotent."""
        self._base.close()
