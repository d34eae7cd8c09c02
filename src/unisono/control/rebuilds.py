"""New groups made up of newcomers and of an old group's survivors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from unisono.control.groups import Groups
from unisono.control.replies import Outgoing, failed
from unisono.control.waiting_requests import WaitingRequests
from unisono.core.failure import Cause

__all__ = ["RebuildRequest", "Rebuilds"]

_ADMISSION = ("admission", "")


@dataclass(slots=True)
class RebuildRequest:
    """One attempt to rebuild a group, with the requests that wait for the outcome.

    Attributes:
        grow: Number of newcomers.
        members: Job-wide numbers of the group's members.
        terms: The old communicator's encoded settings, which newcomers receive.
        size: Total number of ranks in the new group, survivors and newcomers; 0 to use `grow`.
    """

    grow: int
    members: list[int]
    terms: bytes
    size: int
    calls: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"size={self.size}" if self.size else f"grow={self.grow}"

    def newcomers(self, present: int) -> int:
        """Return how many newcomers must join this many survivors; negative if there are too many survivors."""
        return self.size - present if self.size else self.grow


class Rebuilds:
    """Attempts to rebuild groups; each completes once all of its group's ranks and enough newcomers have requested it.

    A member receives the new group's name, and its members' job-wide numbers: the survivors in their old order, then
    the newcomers. A newcomer also receives its own rank, and the settings (`terms`) that a member passed.
    """

    def __init__(self, groups: Groups, waiting: WaitingRequests) -> None:
        self._groups = groups
        self._waiting = waiting
        self._open: dict[tuple[str, int], RebuildRequest] = {}
        self._made: Counter[str] = Counter()
        self._highest: Counter[str] = Counter()

    def call(self, client: int, request: int, name: str, attempt: int, wanted: RebuildRequest) -> Outgoing:
        """Request an attempt to rebuild a group, as one of its members.

        All members must pass the same `grow` and `size`; a member that passes neither accepts the other members'
        `size`. If ranks are lost while newcomers join, the new group's members rebuild it; the newcomers among them
        pass neither, because they do not know the intended size.
        """
        rank = self._groups.rank_of(client, name)
        if rank is None:
            message = f"this rank is no longer a member of {name}: the other ranks continued without it"
            return [(client, failed(request, Cause("AbortedError", None, message)))]
        size = self._groups.of(name).size
        if len(wanted.members) != size:
            # Check now: the list is used only later, in the request of the rank that arrives last.
            message = f"rank {rank} listed {len(wanted.members)} members of {name}, which has {size} ranks"
            return [(client, failed(request, Cause("CommError", rank, message)))]
        rebuild = self._open.setdefault((name, attempt), wanted)
        if not rebuild.grow:
            rebuild.size = rebuild.size or wanted.size
        if rebuild.grow != wanted.grow or wanted.size not in (0, rebuild.size):
            message = f"ranks passed different grow or size to rebuild: rank {rank} {wanted}, others {rebuild}"
            cause = Cause("MismatchError", rank, message)
            return [*self._refuse(name, attempt, cause), (client, failed(request, cause))]
        rebuild.calls[rank] = client, request
        return self.look(name)

    def request_admission(self, client: int, request: int) -> Outgoing:
        """As a newcomer, request admission to the next group that grows."""
        # A client counts as one newcomer, however often it asks.
        self._waiting.forget(client, event=_ADMISSION)
        self._waiting.add(client, request, _ADMISSION)
        return [reply for name in {name for name, _ in self._open} for reply in self.look(name)]

    def look(self, name: str) -> Outgoing:
        """Conclude the attempts that are now complete; called after a rank has arrived or left."""
        out: Outgoing = []
        for key in [key for key in self._open if key[0] == name]:
            rebuild = self._open[key]
            present = self._groups.of(name).present
            # Drop the calls of ranks that have left: these ranks no longer wait for an answer.
            for rank in rebuild.calls.keys() - present.keys():
                del rebuild.calls[rank]
            wanted = rebuild.newcomers(len(present))
            if not present:
                del self._open[key]
            elif present.keys() == rebuild.calls.keys() and wanted < 0:
                message = f"rebuild({rebuild}) cannot leave out any of the {len(present)} ranks that are there"
                out += self._refuse(*key, Cause("CommError", None, message))
            elif present.keys() == rebuild.calls.keys() and self._waiting.count(_ADMISSION) >= wanted:
                del self._open[key]
                out += self._conclude(name, rebuild)
        return out

    def exclude_missing(self, client: int, request: int, name: str, attempt: int, waited_s: float) -> Outgoing:
        """Handle a member's timeout: continue without missing ranks, or fail if newcomers are missing."""
        rebuild = self._open.get((name, attempt))
        if rebuild is None:
            return []
        out: Outgoing = []
        for rank in self._groups.of(name).present.keys() - rebuild.calls.keys():
            message = f"rank {rank} did not call rebuild within {waited_s:.1f} s; the other ranks continued without it"
            out += self._groups.expel(name, rank, Cause("AbortedError", rank, message))
        out += self.look(name)
        if (name, attempt) in self._open:
            some = self._waiting.count(_ADMISSION)
            wanted = rebuild.newcomers(len(rebuild.calls))
            message = f"waited {waited_s:.1f} s in rebuild for {wanted} new ranks, of which {some} have joined"
            out += self._refuse(name, attempt, Cause("CommTimeoutError", None, message))
        return out

    def _conclude(self, name: str, rebuild: RebuildRequest) -> Outgoing:
        ranks = sorted(rebuild.calls)
        base = name.partition("~")[0]
        self._made[base] += 1
        made = f"{base}~{self._made[base]}"
        newcomers = self._waiting.take(_ADMISSION, rebuild.newcomers(len(ranks)))
        self._highest[base] = max(self._highest[base], *rebuild.members)
        numbers = [self._highest[base] + 1 + index for index in range(len(newcomers))]
        self._highest[base] += len(newcomers)
        members = [*(rebuild.members[rank] for rank in ranks), *numbers]
        calls = [rebuild.calls[rank] for rank in ranks]
        for index, (client, _) in enumerate([*calls, *newcomers]):
            # Add all ranks to the new group now, so that a rank that dies before its own join is also reported as lost.
            self._groups.join(client, 0, made, index, len(members), members)
        out: Outgoing = [(client, (request, "ok", (made, members))) for client, request in calls]
        for index, (client, request) in enumerate(newcomers):
            out.append((client, (request, "ok", (made, members, len(ranks) + index, rebuild.terms))))
        return out

    def _refuse(self, name: str, attempt: int, cause: Cause) -> Outgoing:
        rebuild = self._open.pop((name, attempt))
        return [(client, failed(request, cause)) for client, request in rebuild.calls.values()]
