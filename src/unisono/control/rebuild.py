"""Rebuilds of a group from its survivors and newcomers: agreement on the members and the name."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from unisono.control.membership import Groups, Outgoing, failed
from unisono.core.failure import Cause

__all__ = ["Rebuilds"]


@dataclass(slots=True)
class _Rebuild:
    """One attempt of one group, with the requests that wait for the outcome."""

    grow: int
    members: list[int]
    terms: bytes
    calls: dict[int, tuple[int, int]] = field(default_factory=dict)


class Rebuilds:
    """Attempts to rebuild groups, each complete when every rank in the group has requested it and newcomers are there.

    A member receives the new group's name, and its members' numbers in the job: the survivors' in their old order, then
    the newcomers'. A newcomer receives these, its own rank, and the terms that a member passed.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._open: dict[tuple[str, int], _Rebuild] = {}
        self._applicants: dict[int, int] = {}
        self._made: Counter[str] = Counter()
        self._highest: Counter[str] = Counter()

    def call(
        self, client: int, request: int, name: str, attempt: int, grow: int, members: list[int], terms: bytes
    ) -> Outgoing:
        """Request an attempt, as a member; all pass the same numbers, and the members' numbers in the job."""
        rank = self._groups.rank_of(client, name)
        if rank is None:
            message = f"this rank is no longer a member of {name}: the other ranks continued without it"
            return [(client, failed(request, Cause("AbortedError", None, message)))]
        rebuild = self._open.setdefault((name, attempt), _Rebuild(grow, members, terms))
        if rebuild.grow != grow:
            message = (
                f"ranks passed different grow to rebuild: rank {rank} {grow}, others {rebuild.grow}; pass the same"
            )
            return self._refuse(name, attempt, (client, request), Cause("MismatchError", rank, message))
        rebuild.calls[rank] = client, request
        return self.look(name)

    def request_admission(self, client: int, request: int) -> Outgoing:
        """Request admission of a newcomer to the group that grows next."""
        self._applicants[client] = request
        return [reply for name in {name for name, _ in self._open} for reply in self.look(name)]

    def look(self, name: str) -> Outgoing:
        """Conclude the attempts that are complete now; called when a rank has arrived or left."""
        out: Outgoing = []
        for key in [key for key in self._open if key[0] == name]:
            rebuild, present = self._open[key], self._groups.present(name)
            # A rank that has left gets no answer, and waits for none.
            for rank in rebuild.calls.keys() - present.keys():
                del rebuild.calls[rank]
            if not present:
                del self._open[key]
            elif present.keys() == rebuild.calls.keys() and len(self._applicants) >= rebuild.grow:
                del self._open[key]
                out += self._conclude(name, rebuild)
        return out

    def exclude_missing(self, client: int, request: int, name: str, attempt: int, waited_s: float) -> Outgoing:
        """Handle a member's timeout: continue without the missing ranks, or fail if newcomers are missing."""
        rebuild = self._open.get((name, attempt))
        if rebuild is None:
            return []
        out: Outgoing = []
        for rank in self._groups.present(name).keys() - rebuild.calls.keys():
            message = f"rank {rank} did not call rebuild within {waited_s:.1f} s; the other ranks continued without it"
            out += self._groups.expel(name, rank, Cause("AbortedError", rank, message))
        out += self.look(name)
        if (name, attempt) in self._open:
            some = len(self._applicants)
            message = f"waited {waited_s:.1f} s in rebuild for {rebuild.grow} new ranks, of which {some} have joined"
            out += self._refuse(name, attempt, None, Cause("CommTimeoutError", None, message))
        return out

    def forget(self, client: int, request: int | None = None) -> None:
        """Remove a newcomer that has left or stopped waiting."""
        if request in (None, self._applicants.get(client)):
            self._applicants.pop(client, None)

    def _conclude(self, name: str, rebuild: _Rebuild) -> Outgoing:
        ranks = sorted(rebuild.calls)
        base = name.partition("~")[0]
        self._made[base] += 1
        made = f"{base}~{self._made[base]}"
        newcomers = [(client, self._applicants.pop(client)) for client in list(self._applicants)[: rebuild.grow]]
        self._highest[base] = max(self._highest[base], *rebuild.members)
        numbers = [self._highest[base] + 1 + index for index in range(len(newcomers))]
        self._highest[base] += len(newcomers)
        members = [*(rebuild.members[rank] for rank in ranks), *numbers]
        calls = [rebuild.calls[rank] for rank in ranks]
        for index, (client, _) in enumerate([*calls, *newcomers]):
            # Joined now, so that a rank that dies before it joins by itself is reported as lost, too.
            self._groups.join(client, 0, made, index, len(members), members)
        out: Outgoing = [(client, (request, "ok", (made, members))) for client, request in calls]
        for index, (client, request) in enumerate(newcomers):
            out.append((client, (request, "ok", (made, members, len(ranks) + index, rebuild.terms))))
        return out

    def _refuse(self, name: str, attempt: int, also: tuple[int, int] | None, cause: Cause) -> Outgoing:
        rebuild = self._open.pop((name, attempt))
        waiting = [*rebuild.calls.values(), *([] if also is None else [also])]
        return [(client, failed(request, cause)) for client, request in waiting]
