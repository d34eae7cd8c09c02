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

__all__ = [
    "AGENT_END_S",
    "AGENT_START_S",
    "END_S",
    "GRACE_S",
    "MPIRUN_END_S",
    "MPIRUN_START_S",
    "SCRIPT_GRACE_S",
    "Outcome",
    "Supervisor",
    "joined",
    "lost",
]

GRACE_S = 3.0
"""After a first failure, how long the other ranks of `launch` may take to end by their own error."""
SCRIPT_GRACE_S = 5.0
"""The same for the ranks of `unisono run`, which print theirs."""
END_S = 1.0
"""How long ranks may take to end when they have been asked to, before they are killed."""
MPIRUN_END_S = 5.0
"""The same for mpirun, which ends its ranks first."""
AGENT_END_S = 10.0
"""The same for the agent on another host, which ends its ranks first."""
MPIRUN_START_S = 120.0
"""In which mpirun must have started its ranks."""
AGENT_START_S = 300.0
"""In which the agent must begin: by default, ranks on other hosts wait no longer for its own."""
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
        ranks: Numbers of the ranks.
        on_failure: With "continue", no failure limits the time of the others. Ranks that are replaced have not ended.
        control: The control plane of the ranks; None if lost ones are not started again.
        grace_s: After a first failure, how long the others may take to end by their own error; `GRACE_S` if None.

    Attributes:
        open: The ranks that have not ended.
        last: For each rank the number of its last start: 0 is the first.
        ended: Outcomes in the order in which ranks ended.
    """

    def __init__(
        self,
        start: Callable[[int, int], None],
        ends: Callable[[float | None], Iterable[Outcome]],
        ranks: Iterable[int],
        on_failure: str,
        control: ControlPlane | None = None,
        grace_s: float | None = None,
    ) -> None:
        self._start = start
        self._ends = ends
        self._control = control
        # What the first failure leaves to the others; None if it changes nothing.
        self._grace_s = None if on_failure == "continue" else grace_s or GRACE_S
        self._deadline = math.inf
        self.open: set[int] = set(ranks)
        self.last: dict[int, int] = dict.fromkeys(self.open, 0)
        self._unjoined = dict(self.last)
        self.ended: list[Outcome] = []

    def run(self, limit_s: float = math.inf) -> list[Outcome]:
        """Start the ranks; return their outcomes in the order in which they ended, when all have, or at the limit.

        Those that run then, or when this raises, are left to the caller.
        """
        for rank in sorted(self.open):
            self._start(rank, 0)
        self._deadline = clock.now() + limit_s
        return self.wait()

    def wait(self) -> list[Outcome]:
        """Return the outcomes of all ranks that have ended, when all have, or at the limit."""
        while self.open and (left_s := seconds_left(self._deadline)):
            for outcome in self._ends(None if left_s == math.inf else left_s):
                self.ended += self._settled(outcome)
            if self._grace_s is not None and any(outcome.error is not None for outcome in self.ended):
                self._deadline = min(self._deadline, clock.now() + self._grace_s)
                # Later failures follow from the first one, so they do not extend the deadline.
                self._grace_s = None
        return self.ended

    def limit(self, within_s: float) -> None:
        """Have `wait` return within this time, whatever fails meanwhile."""
        self._deadline = clock.now() + within_s
        self._grace_s = None

    def stop(self) -> None:
        """Start no rank again from now on."""
        self._control = None

    def _settled(self, outcome: Outcome) -> list[Outcome]:
        """Return the outcome of a rank, with those of replacements that no rank is left to admit.

        Nothing if the rank was lost and is started again.
        """
        rank = outcome.rank
        if rank not in self.open:
            return []
        self.open.remove(rank)
        if not outcome.reported and self._may_start_again(rank):
            self.open.add(rank)
            self.last[rank] += 1
            self._start(rank, self.last[rank])
            return []
        if outcome.error is not None:
            self.stop()
        if self._control is None or any(map(self._has_joined, self.open)):
            return [outcome]
        how = "was lost, and the other ranks ended before a replacement had joined them"
        alone = [lost(each, len(self.last), how) for each in self.open]
        self.open.clear()
        return [outcome, *alone]

    def _may_start_again(self, rank: int) -> bool:
        if self._control is None or not any(map(self._has_joined, self.open)):
            return False
        self._unjoined[rank] = 0 if self._has_joined(rank) else self._unjoined[rank] + 1
        return self._unjoined[rank] < _MOST_UNJOINED

    def _has_joined(self, rank: int) -> bool:
        """Return whether a rank is one of the first, or has joined them."""
        assert self._control is not None
        return not self.last[rank] or self._control.check([joined(rank, self.last[rank])])
