"""Groups of ranks in the control plane: their members, their exchanges of values, and their first failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from unisono.control.replies import Outgoing, failed, pushed
from unisono.core.failure import Cause, left_error, waited_for

__all__ = ["ExchangeEntry", "GroupState", "Groups", "StopRound"]


class ExchangeEntry(NamedTuple):
    """One rank's value in an exchange, and the rank's request for all ranks' values.

    Attributes:
        agree: Whether to answer with None instead of the values if all ranks contributed the same bytes.
    """

    client: int
    request: int
    content: bytes
    agree: bool


@dataclass(slots=True)
class StopRound:
    """A request that all ranks of a group stop at the same step.

    Attributes:
        reason: Reason given with the request.
        passed: Number of step boundaries that each rank had passed when the request arrived.
        verdict: Number of the boundary at which all ranks stop; None until all ranks have reported.
    """

    reason: str
    passed: dict[int, int] = field(default_factory=dict)
    verdict: int | None = None


@dataclass(slots=True)
class GroupState:
    """State of a group. A group that does not exist has no members.

    Attributes:
        present: The client of each rank that is currently in the group.
        left: Ranks that have left or were lost.
        cause: The group's first failure.
        met: Whether the members have exchanged something.
        stop: The first request to stop; None if there is none. The group's failure removes it, and later requests are
            new ones.
    """

    name: str
    size: int
    members: tuple[int, ...] = ()
    present: dict[int, int] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    exchanges: dict[str, dict[int, ExchangeEntry]] = field(default_factory=dict)
    cause: Cause | None = None
    met: bool = False
    stop: StopRound | None = None

    @property
    def awaited(self) -> set[int]:
        """Return the ranks that are in the group or may still join it."""
        return set(range(self.size)) - self.left

    @property
    def complete(self) -> bool:
        """Return whether every rank has joined at some point.

        True for a group that does not exist, because a group is dropped only once all its ranks have joined and left.
        """
        return len(self.present) + len(self.left) == self.size


class Groups:
    """Groups by name, each kept while a rank is in it or may still join.

    Methods send nothing: they return replies, each with the client that should receive it.

    Args:
        on_failure: Called with the name of a failed group and the cause of its failure; returns further replies.
        on_end: Called with the name of a group that all ranks have left; returns further replies.
    """

    def __init__(
        self,
        on_failure: Callable[[str, Cause], Outgoing] = lambda name, cause: [],
        on_end: Callable[[str], Outgoing] = lambda name: [],
    ) -> None:
        self._on_failure = on_failure
        self._on_end = on_end
        self._groups: dict[str, GroupState] = {}
        self._ranks: dict[int, dict[str, int]] = {}
        self._gathering: set[str] = set()

    def join(
        self,
        client: int,
        request: int,
        name: str,
        rank: int,
        size: int,
        members: Sequence[int] = (),
        answer: str | None = None,
    ) -> Outgoing:
        """Add a rank to a group. Idempotent per client. A conflicting join fails a group that is still forming."""
        group = self._groups.setdefault(name, GroupState(name, size))
        group.members = group.members or tuple(members)
        contradiction = self._contradiction(group, client, rank, size)
        if contradiction is not None:
            cause = Cause("MismatchError", rank, contradiction)
            return [*([] if group.complete else self.fail(name, cause)), (client, failed(request, cause))]
        group.present[rank] = client
        self._ranks.setdefault(client, {})[name] = rank
        out: Outgoing = [(client, (request, "ok", answer))]
        if group.cause is not None:
            out.append((client, pushed(name, group.cause)))
        (self._gathering.discard if group.complete else self._gathering.add)(name)
        return out + self._missed(name.rpartition("/")[0])

    def _missed(self, name: str) -> Outgoing:
        """Fail subgroups that are still forming and are waiting for a rank that has left the group."""
        parent = self.of(name)
        parts = [self._groups[each] for each in sorted(self._gathering) if each.rpartition("/")[0] == name]
        out: Outgoing = []
        left = {parent.members[rank] for rank in parent.left} if parts and parent.members else ()
        for part in parts:
            missing = [
                r
                for r, number in enumerate(part.members)
                if number in left and r not in part.present and r not in part.left
            ]
            if missing:
                message = f"rank {missing[0]} was lost before it joined {part.name}"
                out += self.fail(part.name, Cause("PeerLostError", missing[0], message))
        return out

    def _contradiction(self, group: GroupState, client: int, rank: int, size: int) -> str | None:
        if size != group.size:
            return (
                f"rank {rank} declares {size} ranks for {group.name}, other ranks {group.size}; start all of them "
                "with the same number"
            )
        if not 0 <= rank < size:
            return f"rank {rank} is out of range for {size} ranks"
        if rank in group.left:
            return f"rank {rank} of {group.name} has left or was lost before; a new group needs a new name"
        if group.present.get(rank, client) != client:
            return f"two processes claim to be rank {rank} of {group.name}; give each one its own rank"
        return None

    def vacate(self, client: int, name: str) -> bool:
        """Let another process replace a lost process; return False if it is too late for that.

        A process can be replaced until the members have exchanged something, because members don't know each other
        before their first exchange.
        """
        group = self.of(name)
        rank = self.rank_of(client, name)
        if rank is None or group.met or group.cause is not None:
            return False
        del self._ranks[client][name]
        del group.present[rank]
        for exchange in group.exchanges.values():
            exchange.pop(rank, None)
        self._gathering.add(name)
        return True

    def leave(self, client: int, name: str) -> Outgoing:
        """Leave a group cleanly. Other ranks learn of it only if they wait for this rank, now or later."""
        rank = self._ranks.get(client, {}).pop(name, None)
        if rank is None:
            return []
        group = self._groups[name]
        del group.present[rank]
        group.left.add(rank)
        out: Outgoing = []
        for topic, exchange in list(group.exchanges.items()):
            if rank not in exchange:
                out += [(entry.client, failed(entry.request, _left(rank))) for entry in exchange.values()]
                del group.exchanges[topic]
        return out + self._missed(name) + self._forget_if_over(group)

    def leave_all(self, client: int) -> Outgoing:
        """Leave every group cleanly."""
        out = [reply for name in self.names(client) for reply in self.leave(client, name)]
        self._ranks.pop(client, None)
        return out

    def lose(self, client: int, outage: str = "") -> Outgoing:
        """Fail every group of a client that disconnected without leaving, except groups that have already failed."""
        out: Outgoing = []
        for name, rank in self._ranks.pop(client, {}).items():
            group = self._groups[name]
            del group.present[rank]
            group.left.add(rank)
            message = f"rank {rank} was lost: {outage or 'its process ended without closing the communicator'}"
            out += self.fail(name, Cause("PeerLostError", rank, message))
            out += self._missed(name) + self._forget_if_over(group)
        return out

    def exchange(self, client: int, request: int, name: str, topic: str, content: bytes, agree: bool) -> Outgoing:
        """Store a rank's contribution until all ranks have contributed."""
        rank = self.rank_of(client, name)
        if rank is None:
            return [(client, failed(request, Cause("CommError", None, f"this rank has not joined {name}")))]
        group = self._groups[name]
        if group.cause is not None:
            return [(client, failed(request, group.cause))]
        exchange = group.exchanges.setdefault(topic, {})
        if rank in exchange:
            message = f"rank {rank} joined {topic!r} of {name} twice; every exchange needs its own topic"
            return [(client, failed(request, Cause("CommError", rank, message)))]
        exchange[rank] = ExchangeEntry(client, request, content, agree)
        missing_for_good = group.left - exchange.keys()
        if missing_for_good:
            del group.exchanges[topic]
            return [(entry.client, failed(entry.request, _left(min(missing_for_good)))) for entry in exchange.values()]
        if len(exchange) < group.size:
            return []
        del group.exchanges[topic]
        group.met = True
        return _results(exchange)

    def withdraw(self, name: str, topic: str, waited_s: float, report: str = "", deadlock: bool = False) -> Outgoing:
        """Handle a rank's timeout in an exchange: if ranks are still missing, fail the group.

        `report` contains what the waiting rank found out about the missing ranks.
        """
        missing = self.missing(name, topic)
        if not missing:
            return []
        kind = "DeadlockError" if deadlock else "CommTimeoutError"
        return self.fail(name, Cause(kind, missing[0], waited_for(missing, waited_s, topic) + report))

    def missing(self, name: str, topic: str) -> list[int]:
        """Return the ranks that have not joined an exchange yet; none if no rank waits in such an exchange."""
        group = self.of(name)
        exchange = group.exchanges.get(topic)
        return [] if exchange is None else [rank for rank in range(group.size) if rank not in exchange]

    def fail(self, name: str, cause: Cause) -> Outgoing:
        """Unless the group has already failed, store the cause, notify every member, and fail all current exchanges."""
        group = self.of(name)
        if not self.knows(name) or group.cause is not None:
            return []
        group.cause = cause
        group.stop = None
        out: Outgoing = [(client, pushed(name, cause)) for client in group.present.values()]
        for exchange in group.exchanges.values():
            out += [(entry.client, failed(entry.request, cause)) for entry in exchange.values()]
        group.exchanges.clear()
        return out + self._on_failure(name, cause)

    def fail_all(self, cause: Cause) -> Outgoing:
        """Fail every group."""
        return [reply for name in list(self._groups) for reply in self.fail(name, cause)]

    def of(self, name: str) -> GroupState:
        """Return a group, or an empty one if it does not exist; changes to the empty one are lost."""
        return self._groups.get(name) or GroupState(name, 0)

    def knows(self, name: str) -> bool:
        """Return whether the group still exists: a rank is in it, or may still join it."""
        return name in self._groups

    def first_of_all(self) -> dict[int, tuple[str, int]]:
        """Return each client's first group, and its rank there; clients without a group are omitted."""
        return {client: next(iter(ranks.items())) for client, ranks in self._ranks.items() if ranks}

    def rank_of(self, client: int, name: str) -> int | None:
        """Return a client's rank in a group, if it is currently a member."""
        return self._ranks.get(client, {}).get(name)

    def names(self, client: int) -> list[str]:
        """Return the groups that a client is in."""
        return list(self._ranks.get(client, ()))

    def all_names(self) -> list[str]:
        """Return the names of all groups."""
        return list(self._groups)

    def below(self, name: str) -> list[str]:
        """Return the existing subgroups of a group."""
        return [part for part in self._groups if part.startswith(f"{name}/")]

    def expel(self, name: str, rank: int, cause: Cause) -> Outgoing:
        """Remove a rank from a group and notify it; the other members continue without it."""
        group = self._groups[name]
        client = group.present.pop(rank)
        self._ranks[client].pop(name, None)
        group.left.add(rank)
        return [(client, pushed(name, cause)), *self.fail(name, cause)]

    def _forget_if_over(self, group: GroupState) -> Outgoing:
        if len(group.left) < group.size:
            return []
        del self._groups[group.name]
        self._gathering.discard(group.name)
        return self._on_end(group.name)


def _results(exchange: dict[int, ExchangeEntry]) -> Outgoing:
    contents = [exchange[rank].content for rank in range(len(exchange))]
    same = all(content == contents[0] for content in contents)
    # Answer rank 0 last: if rank 0 runs in this server's process, its thread would take the GIL from this one.
    last_first = (exchange[rank] for rank in reversed(range(len(exchange))))
    return [(entry.client, (entry.request, "ok", None if entry.agree and same else contents)) for entry in last_first]


def _left(rank: int) -> Cause:
    return Cause("PeerLostError", rank, left_error(rank).message)
