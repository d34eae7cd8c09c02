"""A rank's count of its steps, so that all ranks can stop at the same one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["STOPPED_SAVED", "STOPPED_UNSAVED", "StepBoundaries"]

STOPPED_SAVED = 75
"""Exit status of a rank that was stopped, and can be resumed from a checkpoint of that step (EX_TEMPFAIL)."""
STOPPED_UNSAVED = 74
"""Exit status of a rank that was stopped without a checkpoint of that step (EX_IOERR)."""


class StepBoundaries:
    """Number of step boundaries that this rank has passed in one communicator.

    | state | event | new state |
    |---|---|---|
    | running | a stop was requested: `hold`, in the control thread | held |
    | held | the training thread arrives at a boundary, and gets the verdict | decided |

    Nothing is sent while running. `hold` sets `requested` and only then reads `passed`; the training thread counts a
    boundary and only then reads `requested`. So each boundary is either in the number that `hold` returns, or waits for
    the verdict. In the opposite order of either, a boundary could be passed that the verdict does not know of.

    Attributes:
        passed: Number of boundaries at which this rank has arrived.
        requested: Reason of the request; None while it is running.
        stops_at: The verdict: number of the boundary at which all ranks stop; None before.
        saved_at: Number of boundaries passed at the latest complete save, or load; None before.
        followers: Called with each communicator that takes the place of this one.
    """

    __slots__ = ("followers", "passed", "requested", "saved_at", "stops_at")

    def __init__(self) -> None:
        self.passed: int = 0
        self.requested: str | None = None
        self.stops_at: int | None = None
        self.saved_at: int | None = None
        self.followers: list[Callable[[Any], None]] = []

    @property
    def unused(self) -> bool:
        """Whether this rank has neither counted a boundary nor received a request."""
        return not self.passed and self.requested is None

    @property
    def stopped(self) -> bool:
        """Whether this rank has arrived at the boundary at which all stop."""
        return self.stops_at is not None and self.passed >= self.stops_at

    @property
    def reason(self) -> str | None:
        """Reason of the request at which this rank has stopped; None before it has."""
        return self.requested if self.stopped else None

    @property
    def saved(self) -> bool:
        """Whether the step at which all stop is saved: the latest save was made after it, the last step there is."""
        return self.stopped and self.saved_at is not None and self.saved_at + 1 >= (self.stops_at or 0)

    @property
    def counts(self) -> tuple[int, int | None]:
        """Boundaries passed, and the verdict, for `catch_up` on another rank."""
        return self.passed, self.stops_at

    def catch_up(self, counts: Sequence[Sequence[int | None]]) -> None:
        """Continue with the count of the rank that has passed most: ranks have run loops of different lengths.

        Args:
            counts: `counts` of each rank, by rank.
        """
        self.passed = max(passed or 0 for passed, _ in counts)
        self.stops_at = next((verdict for _, verdict in counts if verdict is not None), None)

    def end(self, comm: Any, successor: StepBoundaries) -> None:
        """Pass a request and the followers on to the communicator that takes the place of this one, and its boundaries.

        It is already the latest: a request that arrives too late to be seen here is made to it. The ranks that are left
        have not stopped yet, and newcomers know of no request.
        """
        successor.followers = self.followers
        for follow in self.followers:
            follow(comm)
        if self.requested is not None:
            comm.request_stop(self.requested)

    def hold(self, reason: str) -> int:
        """Let the next boundary wait for the verdict. Return the number of boundaries passed before."""
        self.requested = reason
        return self.passed
