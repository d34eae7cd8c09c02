"""Requests for all ranks of a group to stop at the same step."""

from __future__ import annotations

from unisono.control.groups import Groups, StopRound
from unisono.control.replies import Outgoing
from unisono.control.waiting_requests import WaitingRequests
from unisono.core.failure import Cause

__all__ = ["StopRounds"]


class StopRounds:
    """Requests to stop, one per group: only a group's first request counts.

    A request is pushed to all ranks of the group. Each rank reports how many step boundaries it has passed, and passes
    no further boundary until the stop boundary is known. As in JAX's preemption sync manager, all ranks stop at the
    largest reported number plus 1, a boundary that no rank has passed.

    Args:
        groups: The groups of the job.
        waiting: Receives the requests for the stop boundary, each from a client that has reached its next boundary.
    """

    def __init__(self, groups: Groups, waiting: WaitingRequests) -> None:
        self._groups = groups
        self._waiting = waiting

    def request(self, name: str, reason: str) -> Outgoing:
        """Begin a round in a group, unless the group already has one, or has ended."""
        group = self._groups.of(name)
        if group.stop is not None or not self._groups.knows(name):
            return []
        group.stop = StopRound(reason)
        return [(client, (0, "boundary", (name, reason))) for client in group.present.values()]

    def joined(self, client: int, name: str) -> Outgoing:
        """Push a group's round to a member that joined after the round began."""
        current = self._groups.of(name).stop
        return [] if current is None else [(client, (0, "boundary", (name, current.reason)))]

    def passed(self, client: int, name: str, count: int) -> Outgoing:
        """Record a rank's report."""
        rank = self._groups.rank_of(client, name)
        current = self._groups.of(name).stop
        if rank is None or current is None:
            return []
        current.passed[rank] = count
        return self.look(name)

    def ask(self, client: int, request: int, name: str) -> Outgoing:
        """Accept a request for the stop boundary, which is answered once all ranks have reported."""
        # A rank requests the stop boundary only after receiving the stop request, so a missing round means that the
        # group has failed or ended in the meantime.
        if self._groups.of(name).stop is None:
            return [(client, (request, "ok", None))]
        # The client has reached its next boundary, and waits there.
        self._waiting.add(client, request, ("stop", name), name)
        return self.look(name)

    def look(self, name: str) -> Outgoing:
        """Choose the stop boundary if all remaining ranks have reported, and answer the requests for it."""
        group = self._groups.of(name)
        current = group.stop
        if current is None:
            return []
        if current.verdict is None:
            if not group.awaited <= current.passed.keys():
                return []
            current.verdict = max(current.passed.values(), default=0) + 1
        return [(client, (request, "ok", current.verdict)) for client, request in self._waiting.take(("stop", name))]

    def unreported(self, name: str, waited_s: float, report: str) -> Cause | None:
        """Return a failure that names the ranks that have not reported; None if all have, or if there is no round."""
        group = self._groups.of(name)
        missing = [] if group.stop is None else sorted(group.awaited - group.stop.passed.keys())
        if not missing:
            return None
        ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing[:8]))}{' and more' * (len(missing) > 8)}"
        text = f"waited {waited_s:.1f} s for {ranks} to report the current step, so that all can stop at the same one"
        return Cause("CommTimeoutError", missing[0], text + report)
