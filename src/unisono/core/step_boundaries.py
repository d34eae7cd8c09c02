"""A rank's step count, so that all ranks can stop at the same step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["STOPPED_SAVED", "STOPPED_UNSAVED", "StepBoundaries"]

STOPPED_SAVED = 75
"""Exit status of a stopped rank that can resume from a checkpoint of that step (EX_TEMPFAIL)."""
STOPPED_UNSAVED = 74
"""Exit status of a stopped rank without a checkpoint of that step (EX_IOERR)."""


class StepBoundaries:
    """Number of step boundaries that this rank has passed in one communicator.

    | state | event | new state |
    |---|---|---|
    | running | a stop was requested: `hold`, in the control thread | held |
    | held | the training thread reaches a boundary, and receives the stop boundary | decided |

    In the state "running", nothing is sent. `hold` sets `requested` and only then reads `passed`; the training thread
    counts a boundary and only then reads `requested`. So, for each boundary, either the number that `hold` returns
    includes it, or the training thread waits at it until the stop boundary is known. If either thread reversed its two
    steps, the training thread could pass a boundary that `hold` does not count.

    Attributes:
        passed: Number of boundaries that this rank has reached.
        requested: Reason for the stop request; None while running.
        stops_at: The stop boundary: the number of the boundary at which all ranks stop; None until it is known.
        saved_at: Number of boundaries passed at the latest complete save or load; None before the first.
        followers: Functions to call with each communicator that replaces this one.
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
        """Whether this rank has reached the boundary at which all ranks stop."""
        return self.stops_at is not None and self.passed >= self.stops_at

    @property
    def reason(self) -> str | None:
        """Why the ranks have stopped; None as long as this rank has not stopped."""
        return self.requested if self.stopped else None

    @property
    def saved(self) -> bool:
        """Whether the last step, at which all ranks stop, has been saved."""
        return self.stopped and self.saved_at is not None and self.saved_at + 1 >= (self.stops_at or 0)

    @property
    def counts(self) -> tuple[int, int | None]:
        """Number of boundaries passed, and the stop boundary, for use by `catch_up` on another rank."""
        return self.passed, self.stops_at

    def catch_up(self, counts: Sequence[Sequence[int | None]]) -> None:
        """Continue from the highest count of all ranks, since their loops may have had different lengths.

        Args:
            counts: The ranks' `counts`, in rank order.
        """
        self.passed = max(passed or 0 for passed, _ in counts)
        self.stops_at = next((verdict for _, verdict in counts if verdict is not None), None)

    def end(self, comm: Any, successor: StepBoundaries) -> None:
        """Hand over the stop request and the functions in `followers` to the communicator that replaces this one.

        The new communicator is already current, so it receives any stop request that arrives too late for the replaced
        one. A stop request that has arrived is repeated, because the surviving ranks have not stopped yet, and
        newcomers don't know about it.
        """
        successor.followers = self.followers
        for follow in self.followers:
            follow(comm)
        if self.requested is not None:
            comm.request_stop(self.requested)

    def hold(self, reason: str) -> int:
        """Make training wait at its next boundary until the stop boundary is known.

        Returns the number of boundaries passed so far.
        """
        self.requested = reason
        return self.passed
