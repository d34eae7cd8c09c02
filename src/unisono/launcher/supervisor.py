"""Supervision of ranks: collects their outcomes, replaces lost ranks, and limits the time after a failure.

The caller supplies functions that start ranks and that report outcomes. This module does not import torch.
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
"""Seconds after the first failure in which the other ranks of `launch` may fail with their own error."""
SCRIPT_GRACE_S = 5.0
"""Grace period like `GRACE_S`, for the ranks of `unisono run`, which need time to print their errors."""
END_S = 1.0
"""Seconds in which ranks may exit after a request to end, before they are killed."""
MPIRUN_END_S = 5.0
"""Like `END_S`, for mpirun, which ends its ranks before it exits."""
AGENT_END_S = 10.0
"""Like `END_S`, for the agent on another host, which ends its ranks before it exits."""
MPIRUN_START_S = 120.0
"""Seconds in which mpirun must start its ranks."""
AGENT_START_S = 300.0
"""Seconds in which the agent must start. By default, ranks on other hosts wait no longer than this for its ranks."""
_MOST_UNJOINED = 2
"""A rank is not replaced again after this many consecutive replacements were lost before they joined."""


@dataclass(slots=True)
class Outcome:
    """Outcome of one rank.

    Attributes:
        result: The return value of the rank's program.
        error: The rank's error with its traceback, or an error that describes how its process ended.
        reported: Whether the rank itself sent this outcome.
    """

    rank: int
    result: Any = None
    error: BaseException | None = None
    reported: bool = True


def lost(rank: int, size: int, how: str) -> Outcome:
    """Return the outcome of a rank that ended without reporting."""
    return Outcome(rank, error=PeerLostError(f"rank {rank} of {size} {how}", peer=rank), reported=False)


def joined(rank: int, attempt: int) -> str:
    """Return the control-plane key that is set when a replacement has joined the other ranks."""
    return f"joined/{rank}/{attempt}"


class Supervisor:
    """Supervisor of a job's ranks, from their start to their end.

    A lost rank is replaced, unless two consecutive replacements of it were lost before they joined, or no rank is left
    that could admit a replacement. If a rank fails with an error, the job ends, and lost ranks are no longer replaced.

    Args:
        start: Function that starts a rank, given the rank and the number of times it has been started before.
        ends: Function that waits for outcomes, for at most the given number of seconds (None for no limit), and returns
            them.
        ranks: The ranks' numbers.
        on_failure: With "continue", the other ranks have unlimited time after a failure. A lost rank that is replaced
            does not count as a failure.
        control: The ranks' control plane; None if lost ranks are not replaced.
        grace_s: Seconds for the other ranks to end with their own error after the first failure; `GRACE_S` if None.

    Attributes:
        open: The ranks that have not ended.
        last: For each rank, the index of its latest attempt, counted from 0.
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
        # Time that the other ranks have after the first failure; None if there is no limit, or once the deadline is
        # set.
        self._grace_s = None if on_failure == "continue" else grace_s or GRACE_S
        self._deadline = math.inf
        self.open: set[int] = set(ranks)
        self.last: dict[int, int] = dict.fromkeys(self.open, 0)
        self._unjoined = dict(self.last)
        self.ended: list[Outcome] = []

    def run(self, limit_s: float = math.inf) -> list[Outcome]:
        """Start the ranks, and wait for them or for the time limit; return the outcomes in the order of completion.

        The caller must end the ranks that are still running when this method returns or raises an exception.
        """
        for rank in sorted(self.open):
            self._start(rank, 0)
        self._deadline = clock.now() + limit_s
        return self.wait()

    def wait(self) -> list[Outcome]:
        """Wait until all ranks have ended, or until the time limit, and return the outcomes of the ended ranks."""
        while self.open and (left_s := seconds_left(self._deadline)):
            for outcome in self._ends(None if left_s == math.inf else left_s):
                self.ended += self._settled(outcome)
            if self._grace_s is not None and any(outcome.error is not None for outcome in self.ended):
                self._deadline = min(self._deadline, clock.now() + self._grace_s)
                # Only the first failure sets the deadline: later failures follow from it, and must not extend the
                # deadline.
                self._grace_s = None
        return self.ended

    def limit(self, within_s: float) -> None:
        """Make `wait` return within `within_s` seconds; failures in the meantime do not change this deadline."""
        self._deadline = clock.now() + within_s
        self._grace_s = None

    def stop(self) -> None:
        """Stop replacing ranks."""
        self._control = None

    def _settled(self, outcome: Outcome) -> list[Outcome]:
        """Return a rank's outcome, and also outcomes for replacements that no remaining rank can admit.

        Return an empty list if the rank was lost and is being replaced.
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
        """Return whether a rank is an original rank, or a replacement that has joined."""
        assert self._control is not None
        return not self.last[rank] or self._control.check([joined(rank, self.last[rank])])
