"""State of the control plane, as a pure state machine: requests in, replies out, no sockets, threads or clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unisono.control.groups import Groups
from unisono.control.rebuilds import RebuildRequest, Rebuilds
from unisono.control.replies import Outgoing, failed
from unisono.control.request_form import check_form
from unisono.control.status_queries import StatusQueries
from unisono.control.stop_rounds import StopRounds
from unisono.control.waiting_requests import WaitingRequests
from unisono.core.failure import Cause

__all__ = ["ControlState"]

_MOST_ABSENCES = 16


class ControlState:
    """State of one job. Clients are identified by numbers, which the layer that transports the messages assigns.

    Requests are tuples of a verb and its arguments: see the methods whose names begin with `_on_`. Each request gets
    one reply, immediately or later: `(request, "ok", value)` or `(request, "failed", cause)`. A group's failure is
    reported to all members as `(0, "failed", (group, *cause))`.

    Args:
        on_end: Called with the name of a group that all ranks have left, so that holders can drop the group's objects.
        on_left: Called with the label of a client that has disconnected, with or without a goodbye.
        restarts: Whether a rank that leaves or is lost while the group is still forming may join again, even from a new
            process. If False, its absence is an error on the other ranks.

    Values in an exchange are opaque bytes, so "equal" means identical bytes. Memory is bounded: finished exchanges are
    dropped, as are groups that all ranks have left.

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
        self._keys = _KeyValueStore()
        self._groups = Groups(self._group_failed, self._group_over)
        self._surveys = StatusQueries()
        self._waiting = WaitingRequests()
        self._stops = StopRounds(self._groups, self._waiting)
        self._rebuilds = Rebuilds(self._groups, self._waiting)
        self._registrations: dict[tuple[str, int], tuple[int, str, int]] = {}
        # The connected clients, and their labels, if they have any.
        self._clients: dict[int, str | None] = {}
        # Lines for the error messages of ranks that wait in vain, keyed by the missing rank or its host.
        self._absences: dict[int | str, str] = {}

    def handle(self, client: int, request: int, words: tuple[Any, ...]) -> Outgoing:
        """Return replies with their receivers, in sending order. A malformed request raises ValueError or TypeError."""
        self._clients.setdefault(client, None)
        verb, *arguments = words
        handler: Callable[..., Outgoing] | None = getattr(self, f"_on_{verb}", None)
        if handler is None:
            raise ValueError(f"unknown request {verb!r}")
        # Check the arguments now: they are stored, and used later to serve other clients, which would otherwise get the
        # error.
        check_form(handler, verb, arguments)
        return handler(client, request, *arguments)

    def called(self, client: int, content: bytes) -> Outgoing:
        """Raise an error, because only the subclass `WatchedCalls` compares calls on torch's groups."""
        raise ValueError("this control plane compares no calls of torch's groups")

    def lost(self, client: int, outage: str = "") -> Outgoing:
        """Handle the end of a client's connection, which changes nothing after a `bye`.

        `outage` is the reason if the client's host was unreachable.
        """
        names = self._groups.names(client)
        self._vacate(client, "was lost: its process ended")
        out = [*self._forget(client), *self._groups.lose(client, outage)]
        return out + self._look(names)

    def _vacate(self, client: int, how: str) -> None:
        """Undo a client's registration for a world group that ranks are joining, so the rank may register again."""
        for (job, rank), (number, _, last) in list(self._registrations.items()):
            if self._restarts and last == client and self._groups.vacate(client, f"{job}{number}"):
                self._registrations[job, rank] = number - 1, "", client
                self._absent(rank, f"rank {rank} had joined, and {how} before all had joined")

    def refused(self, rank: int | None, host: str, why: str) -> None:
        """Record a refused process for error texts.

        The rank that the process claims is unverified, so that rank does not count as failed.
        """
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
        self._keys[key] = value
        return [*self._wake(key), (client, (request, "ok", None))]

    def _on_get(self, client: int, request: int, key: str, group: str = "") -> Outgoing:
        """Answer when the key is set. If a group is given, its failure also ends the wait.

        Nothing blocks: a request that must wait is kept until its key is set.
        """
        cause = self._groups.of(group).cause if group else None
        if cause is not None:
            return [(client, failed(request, cause))]
        value = self._keys.get(key)
        if value is not None:
            return [(client, (request, "ok", value))]
        self._waiting.add(client, request, ("key", key), group or None)
        return []

    def _on_forget(self, client: int, request: int, other: int) -> Outgoing:
        self._waiting.forget(client, other)
        return [(client, (request, "ok", None))]

    def _on_add(self, client: int, request: int, key: str, amount: int) -> Outgoing:
        try:
            total = self._keys.add(key, amount)
        except ValueError:
            return [(client, failed(request, Cause("CommError", None, f"the key {key!r} holds no number to add to")))]
        return [*self._wake(key), (client, (request, "ok", total))]

    def _on_compare_set(self, client: int, request: int, key: str, expected: bytes, desired: bytes) -> Outgoing:
        value = self._keys.compare_set(key, expected, desired)
        return [*self._wake(key), (client, (request, "ok", value))]

    def _on_check(self, client: int, request: int, keys: list[str]) -> Outgoing:
        return [(client, (request, "ok", all(key in self._keys for key in keys)))]

    def _on_delete(self, client: int, request: int, key: str) -> Outgoing:
        return [(client, (request, "ok", self._keys.pop(key, None) is not None))]

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
        """Leave a group. With `last`, answer only once all ranks have left or the group has failed."""
        if last and self._groups.knows(name) and self._groups.of(name).cause is None:
            self._waiting.add(client, request, ("left", name))
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
        out = self._groups.withdraw(name, topic, waited_s, self._why_missing(name) + report, deadlock)
        return [*out, (client, (request, "ok", None))]

    def _why_missing(self, name: str) -> str:
        """Return lines for a group's error text that say why ranks are missing, as far as known."""
        group = self._groups.of(name)
        if "/" in name or group.complete:
            return ""
        return "".join(f"\n  {why}" for who, why in self._absences.items() if who not in group.present)

    def missing_in_exchange(self, name: str, topic: str) -> list[int]:
        """Return the ranks that have not joined an exchange for which other ranks are waiting."""
        return self._groups.missing(name, topic)

    def _on_fail(self, client: int, request: int, name: str, kind: str, rank: int | None, message: str) -> Outgoing:
        cause = Cause(kind, rank, message)
        out = self._groups.fail(name, cause)
        first = self._groups.of(name).cause or cause
        return [*out, (client, (request, "ok", (first.kind, first.rank, first.message)))]

    def _on_fail_all(self, client: int, request: int, kind: str, message: str) -> Outgoing:
        return [*self._groups.fail_all(Cause(kind, None, message)), (client, (request, "ok", None))]

    def _on_cause(self, client: int, request: int, name: str) -> Outgoing:
        cause = self._groups.of(name).cause
        return [(client, (request, "ok", None if cause is None else (cause.kind, cause.rank, cause.message)))]

    # -- surveys -----------------------------------------------------------------------------------
    def _on_survey(self, client: int, request: int, name: str | None) -> Outgoing:
        """Query the activity of a group's members, or of all clients that are in any group."""
        labels = self._groups.first_of_all()
        if name is not None:
            labels = {other: (name, rank) for rank, other in self._groups.of(name).present.items()}
        return self._surveys.start_query(client, request, labels)

    def _on_answer(self, client: int, request: int, number: int, content: bytes) -> Outgoing:
        """Record a client's answer to a query. The client gets no reply."""
        return self._surveys.answer(client, number, content)

    def _on_enough(self, client: int, request: int, other: int) -> Outgoing:
        return [*self._surveys.end_query(client, other), (client, (request, "ok", None))]

    # -- stopping at the same step -----------------------------------------------------------------
    def _on_stop(self, client: int, request: int, name: str | None, reason: str) -> Outgoing:
        """Ask all ranks of a group to stop; without a name, ask the ranks of all groups.

        Answer with the number of clients.
        """
        names = self._groups.all_names() if name is None else [name]
        out = [reply for each in names for reply in self._stops.request(each, reason)]
        asked = {other for each in names for other in self._groups.of(each).present.values()}
        return [*out, (client, (request, "ok", len(asked)))]

    def _on_passed(self, client: int, request: int, name: str, count: int) -> Outgoing:
        """Record the number of step boundaries that a rank has passed. The client gets no reply."""
        return self._stops.passed(client, name, count)

    def _on_verdict(self, client: int, request: int, name: str) -> Outgoing:
        """Answer with the boundary at which all ranks of the group stop, once it is known; a failure ends the wait."""
        cause = self._groups.of(name).cause
        return self._stops.ask(client, request, name) if cause is None else [(client, failed(request, cause))]

    def _on_unreported(self, client: int, request: int, name: str, waited_s: float, report: str = "") -> Outgoing:
        """Handle a rank's timeout while it waits for the stop boundary: if ranks have not reported, fail the group."""
        cause = self._stops.unreported(name, waited_s, report)
        out = [] if cause is None else self._groups.fail(name, cause)
        return [*out, (client, (request, "ok", None))]

    # -- debugging ---------------------------------------------------------------------------------
    def _on_hold(self, client: int, request: int, reason: str | None) -> Outgoing:
        """Notify all clients that are in any group that they are held or released."""
        notices = [(other, (0, "held", reason)) for other in self._groups.first_of_all()]
        return [*notices, (client, (request, "ok", None))]

    # -- replacing groups --------------------------------------------------------------------------
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
        return self._rebuilds.call(client, request, name, attempt, RebuildRequest(grow, members, terms, size))

    def _on_without(self, client: int, request: int, name: str, attempt: int, waited_s: float) -> Outgoing:
        out = self._rebuilds.exclude_missing(client, request, name, attempt, waited_s)
        return [*out, (client, (request, "ok", None))]

    def _on_apply(self, client: int, request: int) -> Outgoing:
        return self._rebuilds.request_admission(client, request)

    # -- clients -----------------------------------------------------------------------------------
    def _on_enrol(self, client: int, request: int, job: str, rank: int, size: int, process: str) -> Outgoing:
        """Join the next world group of a job; answer with the group's name.

        Each `init` of a rank joins the next world group. A rank's new process may take over after the previous process
        has ended; a second process at the same time is an error, and fails the group if it is still forming.
        """
        number, holder, last = self._registrations.get((job, rank), (0, process, client))
        if holder != process and last in self._clients:
            message = (
                f"two processes claim to be rank {rank} of {job}; give each one its own rank, and each job its own port"
            )
            cause = Cause("MismatchError", rank, message)
            name = f"{job}{number}"
            out = [] if self._groups.of(name).complete else self._groups.fail(name, cause)
            return [*out, (client, failed(request, cause))]
        self._registrations[job, rank] = number + 1, process, client
        # Drop the reason for the rank's absence, which would be wrong for a later absence.
        self._absences.pop(rank, None)
        name = f"{job}{number + 1}"
        return self._groups.join(client, request, name, rank, size, answer=name)

    def _on_identify(self, client: int, request: int, label: str) -> Outgoing:
        """Label this client; `on_left` receives the label when the client leaves."""
        self._clients[client] = label
        return [(client, (request, "ok", None))]

    def _on_bye(self, client: int, request: int) -> Outgoing:
        """Leave all groups cleanly; the connection may end now."""
        names = self._groups.names(client)
        # A rank that disconnects may return to this server: between two calls of `init`, rank 0 withdraws its address,
        # so the rank searches for rank 0 elsewhere, but rank 0 often keeps its server. If the rank's registration still
        # counted, it would then join the world group after the one in which the other ranks wait for it.
        self._vacate(client, "left again")
        out = [*self._forget(client), *self._groups.leave_all(client), *self._look(names)]
        return [*out, (client, (request, "ok", None))]

    def _forget(self, client: int) -> Outgoing:
        label = self._clients.pop(client, None)
        if label is not None:
            self._on_left(label)
        self._waiting.forget(client)
        return self._surveys.forget(client)

    def _look(self, names: Sequence[str]) -> Outgoing:
        """Conclude the groups' rebuilds and stop rounds that waited only for ranks that have left."""
        return [reply for name in names for reply in (*self._rebuilds.look(name), *self._stops.look(name))]

    # -- relations between groups and keys ---------------------------------------------------------
    def _wake(self, key: str) -> Outgoing:
        """Answer the requests that wait for a key, if it is set."""
        value = self._keys.get(key)
        return [] if value is None else self._answer_waiting(("key", key), value)

    def _answer_waiting(self, event: tuple[str, str], value: object = None) -> Outgoing:
        return [(client, (request, "ok", value)) for client, request in self._waiting.take(event)]

    def _group_failed(self, name: str, cause: Cause) -> Outgoing:
        """Fail the waits that depend on a failed group, and answer the ranks that are leaving it."""
        out = [(client, failed(request, cause)) for client, request in self._waiting.take_failed(name)]
        return out + self._answer_waiting(("left", name))

    def _group_over(self, name: str) -> Outgoing:
        """Delete the keys of a group that all ranks have left, and answer the requests that wait for its end.

        The ranks that have left have stayed connected so far, so that nothing that they sent is lost.
        """
        self._on_end(name)
        parts = self._groups.below(name)
        self._keys.drop(_prefixes(name), tuple(prefix for part in parts for prefix in _prefixes(part)))
        return [*self._answer_waiting(("left", name)), *self._answer_waiting(("stop", name))]


class _KeyValueStore(dict[str, bytes]):
    """In-memory map from keys to bytes, with the further operations of torch's stores."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which is stored as decimal text, and return its new value."""
        total = int(self.get(key, b"0")) + amount
        self[key] = b"%d" % total
        return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set the key if its value is `expected`, or if the key is absent and `expected` is empty.

        Return the value after the call, or `expected` if the key is still absent.
        """
        if self.get(key, b"") == expected:
            self[key] = desired
        return self.get(key, expected)

    def drop(self, prefixes: tuple[str, ...], excluded: tuple[str, ...] = ()) -> None:
        """Delete all keys with one of these prefixes, except those with a prefix in `excluded`."""
        for key in [key for key in self if key.startswith(prefixes) and not key.startswith(excluded)]:
            del self[key]


def _prefixes(name: str) -> tuple[str, ...]:
    """Return the prefixes of a group's keys; the keys of torch's own groups start with "torch/"."""
    return f"{name}/", f"torch/{name}/"
