"""The one supervisor of ranks: collects how they end, starts lost ones again, and limits the time after a failure.

How ranks are started, and how their ends are seen, are two functions of its caller. This module loads without torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unisono.core import clock
from unisono.core.work import seconds_left
from unisono.errors import PeerLostError

if TYPE_CHECKING:
    from unisono.core.control import ControlPlane

__all__ = ["END_S", "GRACE_S", "Outcome", "Supervisor", "joined", "lost"]

GRACE_S = 3.0
"""After a first failure, how long the others may take to end by their own error."""
END_S = 1.0
"""How long ranks may take to end when they have been asked to, before they are killed."""
_MOST_UNJOINED = 2
"""Replacements of a rank that may be lost in a row before they have joined the others."""


@dataclass(slots=True)
class Outcome:
    """Outcome of one rank.

    Attributes:
        result: The return value of its program.
        error: The error that it raised, with its traceback, or one that describes how its process ended.
        reported: Whether the rank itself has sent this.
    """

    rank: int
    result: Any = None
    error: BaseException | None = None
    reported: bool = True


def lost(rank: int, size: int, how: str) -> Outcome:
    """Return the outcome of a rank that ended without a report."""
    return Outcome(rank, error=PeerLostError(f"rank {rank} of {size} {how}", peer=rank), reported=False)


def joined(rank: int, attempt: int) -> str:
    """Return the key of the control plane that is set when a replacement has joined the others."""
    return f"joined/{rank}/{attempt}"


class Supervisor:
    """Ranks from their start to their end.

    A lost rank is started again, unless two of its replacements in a row have not joined, or no rank is left to admit
    another one. An error that ends a rank ends the job, so no rank is started again afterwards.

    Args:
        start: Starts a rank; its second argument is 1 for the first replacement of a lost one.
        ends: Returns outcomes as soon as there are any, or none after a number of seconds; None is no limit.
        size: Number of ranks.
        on_failure: With "continue", no failure limits the time of the others. Ranks that are replaced have not ended.
        control: The control plane of the ranks; None if lost ones are not started again.
        limit_s: Seconds for all of them.

    Attributes:
        last: For each rank the number of its last start: 0 is the first.
    """

    def __init__(
        self,
        start: Callable[[int, int], None],
        ends: Callable[[float | None], Iterable[Outcome]],
        size: int,
        on_failure: str,
        control: ControlPlane | None = None,
        limit_s: float | None = None,
    ) -> None:
        self._start = start
        self._ends = ends
        self._size = size
        self._on_failure = on_failure
        self._control = control
        self._limit_s = limit_s
        self._open = set(range(size))
        self._unjoined = [0] * size
        self.last: list[int] = [0] * size

    def run(self) -> list[Outcome]:
        """Start the ranks; return their outcomes in the order in which they ended, when all have, or at the limit.

        Those that run then, or when this raises, are left to the caller.
        """
        for rank in range(self._size):
            self._start(rank, 0)
        deadline = math.inf if self._limit_s is None else clock.now() + self._limit_s
        limits = self._on_failure != "continue"
        ended: list[Outcome] = []
        while self._open and (left_s := seconds_left(deadline)):
            for outcome in self._ends(None if left_s == math.inf else left_s):
                ended += self._settled(outcome)
            if limits and any(outcome.error is not None for outcome in ended):
                # From the first failure, whatever follows from it.
                limits = False
                deadline = min(deadline, clock.now() + GRACE_S)
        return ended

    def stop(self) -> None:
        """Start no rank again from now on."""
        self._control = None

    def _settled(self, outcome: Outcome) -> list[Outcome]:
        """Return the outcome of a rank, with those of replacements that no rank is left to admit.

        Nothing if the rank was lost and is started again.
        """
        rank = outcome.rank
        if rank not in self._open:
            return []
        self._open.remove(rank)
        if not outcome.reported and self._may_start_again(rank):
            self._open.add(rank)
            self.last[rank] += 1
            self._start(rank, self.last[rank])
            return []
        if outcome.error is not None:
            self.stop()
        if self._control is None or any(map(self._has_joined, self._open)):
            return [outcome]
        how = "was lost, and the other ranks ended before a replacement had joined them"
        alone = [lost(each, self._size, how) for each in self._open]
        self._open.clear()
        return [outcome, *alone]

    def _may_start_again(self, rank: int) -> bool:
        if self._control is None or not any(map(self._has_joined, self._open)):
            return False
        self._unjoined[rank] = 0 if self._has_joined(rank) else self._unjoined[rank] + 1
        return self._unjoined[rank] < _MOST_UNJOINED

    def _has_joined(self, rank: int) -> bool:
        """Return whether a rank is one of the first, or has joined them."""
        assert self._control is not None
        return not self.last[rank] or self._control.check([joined(rank, self.last[rank])])
