"""State of the control plane, as a pure state machine: requests in, replies out, no sockets, threads or clock."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from unisono.core.failure import Cause, left_error, waited_for

__all__ = [
    "ControlState",
    "ExchangeEntry",
    "Groups",
    "KeyValueStore",
    "Outgoing",
    "Rebuilds",
    "Reply",
    "StatusQueries",
    "StopRounds",
    "check_form",
    "failed",
    "pushed",
]

_MOST_ABSENCES = 16


class ControlState:
    """State of one job. Clients are numbers that the carrier of the messages assigns.

    Requests are tuples, a verb and its arguments: see the methods that begin with `_on_`. Each gets
    one reply, immediately or later: `(request, "ok", value)` or `(request, "failed", cause)`. A group's
    failure is reported to all members as `(0, "failed", (group, *cause))`.

    Args:
        on_end: Called with the name of a group that all ranks have left, for holders of objects by group.
        on_left: Called with the label of a client that has disconnected, with or without a goodbye.
        restarts: Whether a rank's next process takes the place of one that was lost while ranks still joined; else
            that is a failure of the others.

    Values of an exchange are opaque bytes, so "equal" means that the bytes are equal.
    Memory is bounded: finished exchanges are forgotten, and groups that all ranks have left.

    Example:
        >>> state = ControlState()
        >>> state.handle(1, 7, ("get", "where"))
        []
        >>> state.handle(2, 3, ("set", "where", b"here"))
        [(1, (7, 'ok', b'here')), (2, (3, 'ok', None))]
    """

    def __init__(
        self,
        on_end: Callable[[str], None] = lambda name: None,
        on_left: Callable[[str], None] = lambda label: None,
        *,
        restarts: bool = False,
    ) -> None:
        self._restarts = restarts
        self._on_end = on_end
        self._on_left = on_left
        self._keys = KeyValueStore()
        self._groups = Groups(self._group_failed, self._group_over)
        self._surveys = StatusQueries()
        self._stops = StopRounds(self._groups)
        self._rebuilds = Rebuilds(self._groups)
        self._waits: dict[tuple[int, int], str] = {}
        self._leaving: dict[str, dict[int, int]] = {}
        self._registrations: dict[tuple[str, int], tuple[int, str, int]] = {}
        self._clients: set[int] = set()
        self._labels: dict[int, str] = {}
        # Lines for the errors of ranks that wait in vain, by the rank that is missing, or its host.
        self._absences: dict[int | str, str] = {}

    def handle(self, client: int, request: int, words: tuple[Any, ...]) -> Outgoing:
        """Return replies with their receivers, in sending order. A malformed request raises ValueError or TypeError."""
        self._clients.add(client)
        verb, *arguments = words
        handler: Callable[..., Outgoing] | None = getattr(self, f"_on_{verb}", None)
        if handler is None:
            raise ValueError(f"unknown request {verb!r}")
        # Arguments that are kept are used for other clients later, which would then get the error.
        check_form(handler, verb, arguments)
        return handler(client, request, *arguments)

    def lost(self, client: int, outage: str = "") -> Outgoing:
        """Handle the end of a client's connection without `bye`; `outage` says why if its host was not reachable."""
        names = self._groups.names(client)
        for (job, rank), (number, _, last) in list(self._registrations.items()):
            if self._restarts and last == client and self._groups.vacate(client, f"{job}{number}"):
                # Its next process takes its place in the same world, for which the others still wait.
                self._registrations[job, rank] = number - 1, "", client
                self._absent(rank, f"rank {rank} had joined, and was lost: its process ended before all had joined")
        out = [*self._forget(client), *self._groups.lose(client, outage)]
        return out + self._look(names)

    def refused(self, rank: int | None, host: str, why: str) -> None:
        """Keep, for errors, that a process was refused, and which rank it claims to be. A claim ends nothing."""
        if rank is None:
            self._absent(host, f"a process at {host} was refused: {why}")
        else:
            self._absent(
                rank,
                f"a process at {host} that claims to be rank {rank} was refused because its secret differs: set "
                "UNISONO_SECRET to the same value on every host, or pass the same secret to every rank",
            )

    def _absent(self, who: int | str, why: str) -> None:
        if len(self._absences) < _MOST_ABSENCES:
            self._absences[who] = why

    # -- the store ---------------------------------------------------------------------------------
    def _on_set(self, client: int, request: int, key: str, value: bytes) -> Outgoing:
        return [*self._wake(self._keys.set(key, value), value), (client, (request, "ok", None))]

    def _on_get(self, client: int, request: int, key: str, group: str = "") -> Outgoing:
        """Answer when the key is set. With a group, its failure ends the wait too."""
        cause = self._groups.cause(group) if group else None
        if cause is not None:
            return [(client, failed(request, cause))]
        value = self._keys.get(key, client, request)
        if value is None and group:
            self._waits[client, request] = group
        return [] if value is None else [(client, (request, "ok", value))]

    def _on_forget(self, client: int, request: int, other: int) -> Outgoing:
        self._keys.forget(client, other)
        self._rebuilds.forget(client, other)
        self._stops.forget(client, other)
        self._waits.pop((client, other), None)
        self._forget_leaving(client, other)
        return [(client, (request, "ok", None))]

    def _on_add(self, client: int, request: int, key: str, amount: int) -> Outgoing:
        try:
            total, waiting = self._keys.add(key, amount)
        except ValueError:
            return [(client, failed(request, Cause("CommError", None, f"the key {key!r} holds no number to add to")))]
        return [*self._wake(waiting, b"%d" % total), (client, (request, "ok", total))]

    def _on_compare_set(self, client: int, request: int, key: str, expected: bytes, desired: bytes) -> Outgoing:
        value, waiting = self._keys.compare_set(key, expected, desired)
        return [*self._wake(waiting, value), (client, (request, "ok", value))]

    def _on_check(self, client: int, request: int, keys: list[str]) -> Outgoing:
        return [(client, (request, "ok", self._keys.check(keys)))]

    def _on_delete(self, client: int, request: int, key: str) -> Outgoing:
        return [(client, (request, "ok", self._keys.delete(key)))]

    def _on_num_keys(self, client: int, request: int) -> Outgoing:
        return [(client, (request, "ok", len(self._keys)))]

    # -- groups ------------------------------------------------------------------------------------
    def _on_join(
        self, client: int, request: int, name: str, rank: int, size: int, members: Sequence[int] = ()
    ) -> Outgoing:
        if len(members) not in (0, size):
            raise ValueError(f"{size} ranks must have {size} rank numbers in the job, not {len(members)}")
        return [*self._groups.join(client, request, name, rank, size, members), *self._stops.joined(client, name)]

    def _on_leave(self, client: int, request: int, name: str, last: bool = False) -> Outgoing:
        """Answer immediately, or, with `last`, when all ranks have left."""
        if last and self._groups.knows(name):
            self._leaving.setdefault(name, {})[client] = request
            return [*self._groups.leave(client, name), *self._look([name])]
        return [*self._groups.leave(client, name), *self._look([name]), (client, (request, "ok", None))]

    def _on_exchange(self, client: int, request: int, name: str, topic: str, content: bytes, agree: bool) -> Outgoing:
        return self._groups.exchange(client, request, name, topic, content, agree)

    def _on_withdraw(
        self,
        client: int,
        request: int,
        name: str,
        topic: str,
        waited_s: float,
        report: str = "",
        deadlock: bool = False,
    ) -> Outgoing:
        out = self._groups.withdraw(name, topic, waited_s, self._missing(name) + report, deadlock)
        return [*out, (client, (request, "ok", None))]

    def _missing(self, name: str) -> str:
        """Return lines for an error of a group: why ranks are missing, as far as is known."""
        registered = {rank for (_, rank), (number, *_) in self._registrations.items() if number}
        if "/" in name or self._groups.complete(name):
            return ""
        return "".join(f"\n  {why}" for who, why in self._absences.items() if who not in registered)

    def _on_fail(self, client: int, request: int, name: str, kind: str, rank: int | None, message: str) -> Outgoing:
        first, out = self._groups.fail(name, Cause(kind, rank, message))
        return [*out, (client, (request, "ok", (first.kind, first.rank, first.message)))]

    def _on_fail_all(self, client: int, request: int, kind: str, message: str) -> Outgoing:
        return [*self._groups.fail_all(Cause(kind, None, message)), (client, (request, "ok", None))]

    def _on_cause(self, client: int, request: int, name: str) -> Outgoing:
        cause = self._groups.cause(name)
        return [(client, (request, "ok", None if cause is None else (cause.kind, cause.rank, cause.message)))]

    # -- surveys -----------------------------------------------------------------------------------
    def _on_survey(self, client: int, request: int, name: str | None) -> Outgoing:
        """Query the members of a group, or all clients that are in any group, for what they are doing."""
        labels = self._groups.first_of_all()
        if name is not None:
            labels = {other: (name, rank) for rank, other in self._groups.present(name).items()}
        return self._surveys.start_query(client, request, labels)

    def _on_answer(self, client: int, request: int, number: int, content: bytes) -> Outgoing:
        """Record a client's answer to a survey. It gets no reply."""
        return self._surveys.answer(client, number, content)

    def _on_enough(self, client: int, request: int, other: int) -> Outgoing:
        return [*self._surveys.end_query(client, other), (client, (request, "ok", None))]

    # -- stopping at the same step -----------------------------------------------------------------
    def _on_stop(self, client: int, request: int, name: str | None, reason: str) -> Outgoing:
        """Ask all ranks of a group to stop; without a name, those of all groups."""
        names = self._groups.all_names() if name is None else [name]
        out = [reply for each in names for reply in self._stops.request(each, reason)]
        return [*out, (client, (request, "ok", None))]

    def _on_passed(self, client: int, request: int, name: str, count: int) -> Outgoing:
        """Take the number of step boundaries that a rank has passed. It gets no reply."""
        return self._stops.passed(client, name, count)

    def _on_verdict(self, client: int, request: int, name: str) -> Outgoing:
        """Answer with the boundary at which all ranks of the group stop, once it is known; a failure ends the wait."""
        cause = self._groups.cause(name)
        return self._stops.ask(client, request, name) if cause is None else [(client, failed(request, cause))]

    # -- debugging ---------------------------------------------------------------------------------
    def _on_hold(self, client: int, request: int, reason: str | None) -> Outgoing:
        """Tell all clients that are in any group."""
        told = [(other, (0, "held", reason)) for other in self._groups.first_of_all()]
        return [*told, (client, (request, "ok", None))]

    # -- new groups instead of old ones ------------------------------------------------------------
    def _on_rebuild(
        self,
        client: int,
        request: int,
        name: str,
        attempt: int,
        grow: int,
        members: list[int],
        terms: bytes,
        size: int = 0,
    ) -> Outgoing:
        return self._rebuilds.call(client, request, name, attempt, _Rebuild(grow, members, terms, size))

    def _on_without(self, client: int, request: int, name: str, attempt: int, waited_s: float) -> Outgoing:
        out = self._rebuilds.exclude_missing(client, request, name, attempt, waited_s)
        return [*out, (client, (request, "ok", None))]

    def _on_apply(self, client: int, request: int) -> Outgoing:
        return self._rebuilds.request_admission(client, request)

    # -- clients -----------------------------------------------------------------------------------
    def _on_enrol(self, client: int, request: int, job: str, rank: int, size: int, process: str) -> Outgoing:
        """Join the next world of a job; the answer is its name.

        Each `init` of a rank joins the next world. A rank's next process may take over after its
        last one has ended; a second process at the same time is an error, which fails a world that
        is still forming.
        """
        number, holder, last = self._registrations.get((job, rank), (0, process, client))
        if holder != process and last in self._clients:
            message = (
                f"two processes claim to be rank {rank} of {job}; give each one its own rank, and each job its own port"
            )
            cause = Cause("MismatchError", rank, message)
            name = f"{job}{number}"
            out = [] if self._groups.complete(name) else self._groups.fail(name, cause)[1]
            return [*out, (client, failed(request, cause))]
        self._registrations[job, rank] = number + 1, process, client
        name = f"{job}{number + 1}"
        return self._groups.join(client, request, name, rank, size, answer=name)

    def _on_identify(self, client: int, request: int, label: str) -> Outgoing:
        """Label this client for the owner of the control plane, who is notified when it leaves."""
        self._labels[client] = label
        return [(client, (request, "ok", None))]

    def _on_bye(self, client: int, request: int) -> Outgoing:
        """Leave all groups cleanly; the connection may end now."""
        names = self._groups.names(client)
        out = [*self._forget(client), *self._groups.leave_all(client), *self._look(names)]
        return [*out, (client, (request, "ok", None))]

    def _forget(self, client: int) -> Outgoing:
        self._clients.discard(client)
        label = self._labels.pop(client, None)
        if label is not None:
            self._on_left(label)
        self._keys.forget(client)
        self._rebuilds.forget(client)
        for wait in [wait for wait in self._waits if wait[0] == client]:
            del self._waits[wait]
        self._forget_leaving(client)
        self._stops.forget(client)
        return self._surveys.forget(client)

    def _look(self, names: Sequence[str]) -> Outgoing:
        """Conclude what waits for ranks that have left these groups."""
        return [reply for name in names for reply in (*self._rebuilds.look(name), *self._stops.look(name))]

    # -- relations of groups and keys --------------------------------------------------------------
    def _wake(self, waiting: list[tuple[int, int]], value: bytes) -> Outgoing:
        for wait in waiting:
            self._waits.pop(wait, None)
        return [(client, (request, "ok", value)) for client, request in waiting]

    def _group_failed(self, name: str, cause: Cause) -> Outgoing:
        """End the waits for keys on behalf of a failed group."""
        out: Outgoing = []
        for client, request in [wait for wait, group in self._waits.items() if group == name]:
            del self._waits[client, request]
            self._keys.forget(client, request)
            out.append((client, failed(request, cause)))
        return out + [(client, failed(request, cause)) for client, request in self._stops.drop(name)]

    def _forget_leaving(self, client: int, request: int | None = None) -> None:
        """Remove a client's waits for all others to leave."""
        for waiting in self._leaving.values():
            if request in (None, waiting.get(client)):
                waiting.pop(client, None)

    def _group_over(self, name: str) -> Outgoing:
        """Delete the keys of a group that all ranks have left, and answer the requests that wait for that."""
        self._on_end(name)
        self._stops.drop(name)
        parts = self._groups.below(name)
        self._keys.drop(_prefixes(name), tuple(prefix for part in parts for prefix in _prefixes(part)))
        return [(client, (request, "ok", None)) for client, request in self._leaving.pop(name, {}).items()]


def _prefixes(name: str) -> tuple[str, ...]:
    """Return the prefixes of a group's keys; those of torch's own groups start with "torch/"."""
    return f"{name}/", f"torch/{name}/"


Reply = tuple[int, str, object]
"""Number of the request (0: unsolicited), "ok" or "failed", and the value or the cause's three fields."""

Outgoing = list[tuple[int, Reply]]
"""Replies with their receiving clients, in sending order."""


def failed(request: int, cause: Cause) -> Reply:
    """Return the reply to a request that cannot be done."""
    return request, "failed", (cause.kind, cause.rank, cause.message)


def pushed(name: str, cause: Cause) -> Reply:
    """Return the message that notifies a member of its group's failure."""
    return 0, "failed", (name, cause.kind, cause.rank, cause.message)


class ExchangeEntry(NamedTuple):
    """One rank's value in an exchange, and the request to answer with the others' values.

    Attributes:
        agree: Whether None suffices as the answer if all contributed the same bytes.
    """

    client: int
    request: int
    content: bytes
    agree: bool


@dataclass(slots=True)
class _GroupState:
    name: str
    size: int
    members: tuple[int, ...] = ()
    present: dict[int, int] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    exchanges: dict[str, dict[int, ExchangeEntry]] = field(default_factory=dict)
    cause: Cause | None = None
    met: bool = False

    @property
    def known(self) -> set[int]:
        """Every rank that has ever joined."""
        return self.present.keys() | self.left

    @property
    def complete(self) -> bool:
        return len(self.present) + len(self.left) == self.size

    def fail(self, cause: Cause) -> Outgoing:
        """Keep the first cause, notify every member, and end every exchange with it."""
        if self.cause is not None:
            return []
        self.cause = cause
        out: Outgoing = [(client, pushed(self.name, cause)) for client in self.present.values()]
        for exchange in self.exchanges.values():
            out += [(entry.client, failed(entry.request, cause)) for entry in exchange.values()]
        self.exchanges.clear()
        return out


class Groups:
    """Groups by name, each kept while a rank is in it or may still join.

    All answers are pure values: replies with their receiving clients.

    Args:
        on_failure: Called with the name and the cause of a group that has failed; returns further replies.
        on_end: Called with the name of a group that all ranks have left; returns further replies.
    """

    def __init__(
        self,
        on_failure: Callable[[str, Cause], Outgoing] = lambda name, cause: [],
        on_end: Callable[[str], Outgoing] = lambda name: [],
    ) -> None:
        self._on_failure = on_failure
        self._on_end = on_end
        self._groups: dict[str, _GroupState] = {}
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
        group = self._groups.setdefault(name, _GroupState(name, size))
        group.members = group.members or tuple(members)
        contradiction = self._contradiction(group, client, rank, size)
        if contradiction is not None:
            cause = Cause("MismatchError", rank, contradiction)
            return [*([] if group.complete else self._fail(group, cause)), (client, failed(request, cause))]
        group.present[rank] = client
        self._ranks.setdefault(client, {})[name] = rank
        out: Outgoing = [(client, (request, "ok", answer))]
        if group.cause is not None:
            out.append((client, pushed(name, group.cause)))
        (self._gathering.discard if group.complete else self._gathering.add)(name)
        return out + self._missed(name.rpartition("/")[0])

    def _missed(self, name: str) -> Outgoing:
        """Fail the forming parts of a group that wait for a rank that has left the group."""
        parent = self._groups.get(name)
        parts = [self._groups[each] for each in sorted(self._gathering) if each.rpartition("/")[0] == name]
        out: Outgoing = []
        left = {parent.members[rank] for rank in parent.left} if parent is not None and parts and parent.members else ()
        for part in parts:
            missing = [r for r, number in enumerate(part.members) if number in left and r not in part.known]
            if missing:
                message = f"rank {missing[0]} was lost before it joined {part.name}"
                out += self._fail(part, Cause("PeerLostError", missing[0], message))
        return out

    def _contradiction(self, group: _GroupState, client: int, rank: int, size: int) -> str | None:
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
        """Let another process take the place of one that was lost; return False if it is too late for that.

        It is until the members have exchanged something: before, none of them knows of any other.
        """
        group = self._groups.get(name)
        rank = self._ranks.get(client, {}).get(name)
        if group is None or rank is None or group.met or group.cause is not None:
            return False
        del self._ranks[client][name]
        del group.present[rank]
        for exchange in group.exchanges.values():
            exchange.pop(rank, None)
        self._gathering.add(name)
        return True

    def leave(self, client: int, name: str) -> Outgoing:
        """Leave a group cleanly: only ranks that wait for this one are notified, now or later."""
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
        out: Outgoing = []
        for name in list(self._ranks.get(client, ())):
            out += self.leave(client, name)
        self._ranks.pop(client, None)
        return out

    def lose(self, client: int, outage: str = "") -> Outgoing:
        """Fail every group of a client that disconnected without leaving, if it has not failed before."""
        out: Outgoing = []
        for name, rank in self._ranks.pop(client, {}).items():
            group = self._groups[name]
            del group.present[rank]
            group.left.add(rank)
            message = f"rank {rank} was lost: {outage or 'its process ended without closing the communicator'}"
            out += self._fail(group, Cause("PeerLostError", rank, message))
            out += self._missed(name) + self._forget_if_over(group)
        return out

    def exchange(self, client: int, request: int, name: str, topic: str, content: bytes, agree: bool) -> Outgoing:
        """Keep a rank's contribution until all ranks have contributed."""
        rank = self._ranks.get(client, {}).get(name)
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

        `report` is what the waiting rank has found out about the others.
        """
        group = self._groups.get(name)
        exchange = group.exchanges.get(topic) if group is not None else None
        if group is None or exchange is None:
            return []
        missing = [rank for rank in range(group.size) if rank not in exchange]
        kind = "DeadlockError" if deadlock else "CommTimeoutError"
        return self._fail(group, Cause(kind, missing[0], waited_for(missing, waited_s, topic) + report))

    def fail(self, name: str, cause: Cause) -> tuple[Cause, Outgoing]:
        """Fail the group, and return its first cause, which may now be this one."""
        group = self._groups.get(name)
        out = [] if group is None else self._fail(group, cause)
        return (group and group.cause) or cause, out

    def fail_all(self, cause: Cause) -> Outgoing:
        """Fail every group."""
        return [reply for group in list(self._groups.values()) for reply in self._fail(group, cause)]

    def _fail(self, group: _GroupState, cause: Cause) -> Outgoing:
        return [] if group.cause is not None else [*group.fail(cause), *self._on_failure(group.name, cause)]

    def cause(self, name: str) -> Cause | None:
        """Return the first cause of failure, if there is one."""
        group = self._groups.get(name)
        return group.cause if group is not None else None

    def complete(self, name: str) -> bool:
        """Return whether every rank has joined at some time. A group that is over and forgotten was complete."""
        group = self._groups.get(name)
        return group is None or group.complete

    def present(self, name: str) -> dict[int, int]:
        """Return the client of each rank that is in the group now."""
        group = self._groups.get(name)
        return {} if group is None else dict(group.present)

    def first_of_all(self) -> dict[int, tuple[str, int]]:
        """Return, for each client in any group, the group that it joined first, and its rank there."""
        return {client: next(iter(ranks.items())) for client, ranks in self._ranks.items() if ranks}

    def rank_of(self, client: int, name: str) -> int | None:
        """Return a client's rank in a group, if it is there now."""
        return self._ranks.get(client, {}).get(name)

    def names(self, client: int) -> list[str]:
        """Return the groups that a client is in."""
        return list(self._ranks.get(client, ()))

    def all_names(self) -> list[str]:
        """Return the names of all groups."""
        return list(self._groups)

    def below(self, name: str) -> list[str]:
        """Return the parts of a group that still exist."""
        return [part for part in self._groups if part.startswith(f"{name}/")]

    def expel(self, name: str, rank: int, cause: Cause) -> Outgoing:
        """Remove a rank from a group and notify it; the others continue without it."""
        group = self._groups[name]
        client = group.present.pop(rank)
        self._ranks[client].pop(name, None)
        group.left.add(rank)
        return [(client, pushed(name, cause)), *self._fail(group, cause)]

    def _forget_if_over(self, group: _GroupState) -> Outgoing:
        if len(group.left) < group.size:
            return []
        del self._groups[group.name]
        self._gathering.discard(group.name)
        return self._on_end(group.name)

    def knows(self, name: str) -> bool:
        """Return whether a rank is in the group, or may still join."""
        return name in self._groups


def _results(exchange: dict[int, ExchangeEntry]) -> Outgoing:
    contents = [exchange[rank].content for rank in range(len(exchange))]
    same = all(content == contents[0] for content in contents)
    # Rank 0 last: where its process is the server too, it would take the interpreter from this thread.
    last_first = (exchange[rank] for rank in reversed(range(len(exchange))))
    return [(entry.client, (entry.request, "ok", None if entry.agree and same else contents)) for entry in last_first]


def _left(rank: int) -> Cause:
    return Cause("PeerLostError", rank, left_error(rank).message)


class KeyValueStore:
    """Bytes by name, in memory. Never blocks: a request that must wait is kept until its key is set."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[tuple[int, int]]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def set(self, key: str, value: bytes) -> list[tuple[int, int]]:
        """Set the key, and return the requests (client and request) that have been waiting for it."""
        self._values[key] = value
        return self._waiting.pop(key, [])

    def get(self, key: str, client: int, request: int) -> bytes | None:
        """Return the value, or None; in that case `set` will return this request."""
        value = self._values.get(key)
        if value is None:
            self._waiting.setdefault(key, []).append((client, request))
        return value

    def forget(self, client: int, request: int | None = None) -> None:
        """Remove this request from the waiting ones; without a request, all of this client's."""
        for key, waiting in list(self._waiting.items()):
            waiting[:] = [
                (holder, number) for holder, number in waiting if holder != client or request not in (None, number)
            ]
            if not waiting:
                del self._waiting[key]

    def add(self, key: str, amount: int) -> tuple[int, list[tuple[int, int]]]:
        """Return the counter's new value, and the requests that have been waiting for it to exist."""
        total = int(self._values.get(key, b"0")) + amount
        return total, self.set(key, b"%d" % total)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> tuple[bytes, list[tuple[int, int]]]:
        """Return the value afterwards (`expected` for a key that stays absent), and the requests that waited for it."""
        present = self._values.get(key)
        if present == expected or (present is None and not expected):
            return desired, self.set(key, desired)
        return (expected if present is None else present), []

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def drop(self, prefixes: tuple[str, ...], excluded: tuple[str, ...] = ()) -> None:
        """Delete all keys with one of these prefixes, except those with a prefix in `excluded`."""
        for key in [key for key in self._values if key.startswith(prefixes) and not key.startswith(excluded)]:
            del self._values[key]

    def delete(self, key: str) -> bool:
        return self._values.pop(key, None) is not None


@dataclass(slots=True)
class _Rebuild:
    """One attempt of one group, with the requests that wait for the outcome.

    Attributes:
        grow: Number of newcomers.
        members: The group's members' numbers in the job.
        terms: For newcomers.
        size: Number of ranks afterwards, survivors and newcomers; 0 if `grow` counts.
    """

    grow: int
    members: list[int]
    terms: bytes
    size: int
    calls: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"size={self.size}" if self.size else f"grow={self.grow}"

    def newcomers(self, present: int) -> int:
        """Return how many newcomers must join so many survivors; negative if there are too many of these."""
        return self.size - present if self.size else self.grow


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

    def call(self, client: int, request: int, name: str, attempt: int, wanted: _Rebuild) -> Outgoing:
        """Request an attempt, as a member; all want the same, or nothing, and go along with members that want a size.

        Newcomers that find others lost while they join know no size.
        """
        rank = self._groups.rank_of(client, name)
        if rank is None:
            message = f"this rank is no longer a member of {name}: the other ranks continued without it"
            return [(client, failed(request, Cause("AbortedError", None, message)))]
        rebuild = self._open.setdefault((name, attempt), wanted)
        if not rebuild.grow:
            rebuild.size = rebuild.size or wanted.size
        if rebuild.grow != wanted.grow or wanted.size not in (0, rebuild.size):
            message = f"ranks passed different grow or size to rebuild: rank {rank} {wanted}, others {rebuild}"
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
            rebuild = self._open[key]
            present = self._groups.present(name)
            # A rank that has left gets no answer, and waits for none.
            for rank in rebuild.calls.keys() - present.keys():
                del rebuild.calls[rank]
            if not present:
                del self._open[key]
            elif present.keys() == rebuild.calls.keys() and rebuild.newcomers(len(present)) < 0:
                message = f"rebuild({rebuild}) cannot leave out any of the {len(present)} ranks that are there"
                out += self._refuse(*key, None, Cause("CommError", None, message))
            elif present.keys() == rebuild.calls.keys() and len(self._applicants) >= rebuild.newcomers(len(present)):
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
            wanted = rebuild.newcomers(len(rebuild.calls))
            message = f"waited {waited_s:.1f} s in rebuild for {wanted} new ranks, of which {some} have joined"
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
        admitted = list(self._applicants)[: rebuild.newcomers(len(ranks))]
        newcomers = [(client, self._applicants.pop(client)) for client in admitted]
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


@dataclass(slots=True)
class _Survey:
    client: int
    request: int
    labels: dict[int, tuple[str, int]]
    answers: dict[int, bytes] = field(default_factory=dict)


class StatusQueries:
    """Queries for what each of some clients is doing. An unresponsive client does not delay the others for long.

    The answer to a query is a list of pairs: a client's group and rank, and its report, or None.
    """

    def __init__(self) -> None:
        self._open: dict[int, _Survey] = {}
        self._numbers = itertools.count(1)

    def start_query(self, client: int, request: int, labels: Mapping[int, tuple[str, int]]) -> Outgoing:
        """Send the query to these clients."""
        number = next(self._numbers)
        survey = self._open[number] = _Survey(client, request, dict(labels))
        return [*[(receiver, (0, "asked", number)) for receiver in labels], *self._conclude(number, survey)]

    def answer(self, client: int, number: int, content: bytes) -> Outgoing:
        """Record the answer of a client; a late one is ignored."""
        survey = self._open.get(number)
        if survey is None or client not in survey.labels:
            return []
        survey.answers[client] = content
        return self._conclude(number, survey)

    def end_query(self, client: int, request: int) -> Outgoing:
        """End a query: the client that requested it stops waiting, and receives the answers so far."""
        out: Outgoing = []
        for number, survey in list(self._open.items()):
            if (survey.client, survey.request) == (client, request):
                out += self._conclude(number, survey, require_all=False)
        return out

    def forget(self, client: int) -> Outgoing:
        """Remove a client that has left, from the queries and from their receivers."""
        out: Outgoing = []
        for number, survey in list(self._open.items()):
            if survey.client == client:
                del self._open[number]
            elif survey.labels.pop(client, None) is not None:
                out += self._conclude(number, survey)
        return out

    def _conclude(self, number: int, survey: _Survey, *, require_all: bool = True) -> Outgoing:
        if require_all and len(survey.answers) < len(survey.labels):
            return []
        del self._open[number]
        pairs = [(label, survey.answers.get(client)) for client, label in survey.labels.items()]
        return [(survey.client, (survey.request, "ok", sorted(pairs, key=lambda pair: pair[0])))]


_EARLIER = ("self", "client", "request")
_Test = Callable[[object], bool]


@dataclass(slots=True)
class _StopRound:
    """A request to stop.

    Attributes:
        reason: Reason given with the request.
        passed: Number of step boundaries that each rank had passed when it learnt of the request.
        waiting: Requests for the verdict, by clients that have arrived at their next boundary.
        verdict: Number of the boundary at which all stop; None until all ranks have answered.
    """

    reason: str
    passed: dict[int, int] = field(default_factory=dict)
    waiting: list[tuple[int, int]] = field(default_factory=list)
    verdict: int | None = None


class StopRounds:
    """One request to stop for each group: the first one counts.

    A request is pushed to all ranks of the group. Each reports how many step boundaries it has passed, and passes no
    further one without the verdict, so that the largest number reported, plus 1, is a boundary that no rank has passed.
    The barrier of JAX's preemption sync manager works in the same way.

    Args:
        groups: The groups of the job.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._rounds: dict[str, _StopRound] = {}

    def request(self, name: str, reason: str) -> Outgoing:
        """Begin a round in a group, unless it has one already, or has ended."""
        if name in self._rounds or not self._groups.knows(name):
            return []
        self._rounds[name] = _StopRound(reason)
        return [(client, (0, "boundary", (name, reason))) for client in self._groups.present(name).values()]

    def joined(self, client: int, name: str) -> Outgoing:
        """Push the round of a group to a member that has joined since."""
        current = self._rounds.get(name)
        return [] if current is None else [(client, (0, "boundary", (name, current.reason)))]

    def passed(self, client: int, name: str, count: int) -> Outgoing:
        """Take a rank's report."""
        rank = self._groups.rank_of(client, name)
        if rank is None or name not in self._rounds:
            return []
        self._rounds[name].passed[rank] = count
        return self.look(name)

    def ask(self, client: int, request: int, name: str) -> Outgoing:
        """Take a request for the verdict, which is answered when there is one."""
        # A rank asks only after the push, so there is no round only if its group has ended meanwhile.
        current = self._rounds.get(name)
        if current is None:
            return [(client, (request, "ok", None))]
        current.waiting.append((client, request))
        return self.look(name)

    def look(self, name: str) -> Outgoing:
        """Reach the verdict if all ranks have reported that are left, and answer the requests for it."""
        current = self._rounds.get(name)
        if current is None:
            return []
        if current.verdict is None:
            if not self._groups.complete(name) or not self._groups.present(name).keys() <= current.passed.keys():
                return []
            current.verdict = max(current.passed.values(), default=0) + 1
        waiting = current.waiting
        current.waiting = []
        return [(client, (request, "ok", current.verdict)) for client, request in waiting]

    def drop(self, name: str) -> list[tuple[int, int]]:
        """End the round of a group that has failed or ended. Return the requests for its verdict."""
        current = self._rounds.pop(name, None)
        return [] if current is None else current.waiting

    def forget(self, client: int, request: int | None = None) -> None:
        """Drop the requests of a client, or one of them."""
        for current in self._rounds.values():
            current.waiting = [wait for wait in current.waiting if wait[0] != client or request not in (None, wait[1])]


def check_form(handler: Callable[..., Any], verb: str, arguments: Sequence[object]) -> None:
    """Raise `TypeError` unless these are arguments for the handler of a request, which another process sent.

    Args:
        handler: A method with parameters, after `client` and `request`, of type str, int, float, bool, bytes, lists of
            those, or None.
        verb: Name of the request.
        arguments: The arguments as received.

    Example:
        >>> def on_add(client: int, request: int, key: str, amount: int = 1) -> None: ...
        >>> check_form(on_add, "add", ["count", 2])
        >>> check_form(on_add, "add", ["count", "2"])
        Traceback (most recent call last):
            ...
        TypeError: amount of the request 'add' cannot be a str
    """
    tests = _tests(getattr(handler, "__func__", handler))
    if len(arguments) > len(tests):
        raise TypeError(f"the request {verb!r} has {len(arguments)} arguments, more than {len(tests)}")
    for (name, fits), given in zip(tests, arguments, strict=False):
        if not fits(given):
            raise TypeError(f"{name} of the request {verb!r} cannot be a {type(given).__name__}")


@cache
def _tests(handler: Callable[..., Any]) -> list[tuple[str, _Test]]:
    hints = get_type_hints(handler)
    return [(name, _test(hints[name])) for name in inspect.signature(handler).parameters if name not in _EARLIER]


def _test(hint: Any) -> _Test:
    if isinstance(hint, UnionType):
        tests = [_test(each) for each in get_args(hint)]
        return lambda given: any(fits(given) for fits in tests)
    if get_origin(hint) is not None:
        (inside,) = map(_types, get_args(hint))
        # As sets of types, because the members of a large group are many.
        return lambda given: isinstance(given, (list, tuple)) and {*map(type, given)} <= inside
    known = _types(hint)
    # An exact type: True is no rank.
    return lambda given: type(given) in known


def _types(hint: type) -> set[type]:
    return {float, int} if hint is float else {hint}
