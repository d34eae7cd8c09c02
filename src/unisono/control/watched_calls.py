"""Compares the ranks' calls on torch's process groups, outside the ranks' own processes."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from unisono import serialization
from unisono.control.replies import Outgoing, failed
from unisono.control.report_ring import ReportReader
from unisono.control.request_form import check_form
from unisono.control.state import ControlState
from unisono.core import clock
from unisono.core.call import MAY_BE_WRONG, NOTHING_SENT, Fingerprint, call_text, explain
from unisono.core.failure import Cause, ended_by
from unisono.core.frames import Kind
from unisono.diagnostics.hang_report import BlockedRank, find_cycle
from unisono.host.processes import exit_status

__all__ = ["CALL", "Overdue", "WatchedCalls", "follows"]

CALL = struct.Struct("<HQQIB")
"""Report of a call: index of the group, number of the call in that group, hash of the call's signature, index of the
signature, and code of the reduce operation (0: unknown)."""

_DEADLOCK_S = 0.5
_QUIET_S = 0.3
"""Seconds without a report after which a rank may be blocked, so that the ranks must be asked what they wait for."""
_OTHERS_S = 0.1
"""Seconds to wait, once two ranks differ in a call, until the others have made it, so that the error names all."""
_FIRST_WITHIN_S = 60.0
_CAUSE_S = 1.0
"""Seconds to wait for a report of what broke a connection."""
_DOWN = ("broadcast", "scatter")
_UP = ("reduce", "gather")
_BROKEN = re.compile(r"Connection (closed|reset) by|Broken pipe|Read error|Socket closed|writev|Connection refused")


def follows(error: BaseException) -> bool:
    """Return whether a torch error is a consequence of another rank's exit.

    Example:
        >>> follows(RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:4242")), follows(KeyError("x"))
        (True, False)
    """
    return isinstance(error, RuntimeError) and _BROKEN.search(str(error)) is not None


class Overdue(NamedTuple):
    """A call for which ranks have waited longer than its group's limit.

    Attributes:
        rank: A rank that has not made the call, or None if the call is a receive from any rank.
        text: Description of what the other ranks are waiting for, and for how long.
    """

    rank: int | None
    text: str


class _Made(NamedTuple):
    """One rank's report of a call: the fields of `CALL`, with the signature itself in place of its index."""

    same: int
    signature: bytes
    op: int

    @property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint(*serialization.decode(self.signature))


@dataclass(slots=True)
class _Call:
    """A call that only some ranks of its group have made.

    Attributes:
        since: When the first rank made the call.
        made: Reports of the ranks that have made the call.
        abandoned: Ranks on which the call has failed, and which therefore no longer need other ranks for it.
        asked: Clients and their requests, to be answered when all ranks have made the call.
    """

    since: float
    made: dict[int, _Made] = field(default_factory=dict)
    abandoned: set[int] = field(default_factory=set)
    asked: list[tuple[int, int]] = field(default_factory=list)

    @property
    def waiting(self) -> dict[int, _Made]:
        """Reports of the ranks that still need other ranks for the call."""
        return {rank: part for rank, part in self.made.items() if rank not in self.abandoned}

    @property
    def differs(self) -> bool:
        parts = self.made.values()
        return len({each.same for each in parts}) > 1 or len({each.op for each in parts if each.op}) > 1


@dataclass(slots=True)
class _Group:
    """A torch process group whose members are watched ranks."""

    text: str
    members: tuple[int, ...]
    limit_s: float
    calls: dict[int, _Call] = field(default_factory=dict)


@dataclass(slots=True)
class _Client:
    rank: int
    pid: int
    heard: float
    reports: ReportReader | None
    groups: list[_Group] = field(default_factory=list)
    signatures: list[bytes] = field(default_factory=list)


class WatchedCalls(ControlState):
    """Control plane whose clients report their calls, and receive the first mismatch as the failure of the world group.

    A rank's exit without a known failure is not an error until another rank needs that rank: once a program's processes
    have no more calls in common, they may exit at any time.

    Args:
        now: The clock.
        options: Options of `ControlState`.
    """

    def __init__(self, now: Callable[[], float] = clock.real, **options: Any) -> None:
        super().__init__(**options)
        self._now = now
        self._began = now()
        self._world = ""
        self._present: dict[int, _Client] = {}
        self._known: dict[str, _Group] = {}
        self._gone: dict[int, str] = {}
        self._unclear: dict[int, int] = {}
        self._over = False
        self._victim: tuple[float, int, str] | None = None

    # -- clients -----------------------------------------------------------------------------------
    def _on_attend(self, client: int, request: int, world: str, pid: int, handle: bytes) -> Outgoing:
        """Record that a client begins to report its calls. `pid` is 0 for a process on another host.

        The answer is whether the client's reports are read from the memory that `handle` describes.
        """
        rank = self._groups.rank_of(client, world)
        if rank is None:
            raise ValueError("only a member reports calls")
        self._world = world
        reports = None
        # The client may be in another container.
        with suppress(OSError, ValueError, struct.error):
            reports = ReportReader(handle) if handle else None
        self._present[client] = _Client(rank, pid, self._now(), reports)
        return [(client, (request, "ok", reports is not None))]

    def handle(self, client: int, request: int, words: tuple[Any, ...]) -> Outgoing:
        # Clients may have written reports before this request, and before what led to it on another client.
        return [*self._read_reports(), *super().handle(client, request, words)]

    def _on_settle(self, client: int, request: int) -> Outgoing:
        """Answer whether the watched ranks have failed, once all reports that they have written are compared."""
        return [(client, (request, "ok", self._groups.of(self._world).cause is not None))]

    def _read_reports(self) -> Outgoing:
        """Handle the reports that clients have written to shared memory."""
        out: Outgoing = []
        for client, here in list(self._present.items()):
            if here.reports is None:
                continue
            try:
                for frame in here.reports.read():
                    if frame.kind is Kind.CALL:
                        out += self.called(client, frame.content)
                    else:
                        out += super().handle(client, *serialization.decode(frame.content))
            except Exception as error:  # No matter what a client writes, only the client itself is lost.
                here.reports = None
                out += self._end(client, f"was lost: its reports cannot be read: {error}.")
        return out

    def _on_group(
        self, client: int, request: int, name: str, text: str, members: list[int], limit_s: float
    ) -> Outgoing:
        """Add a group to those whose calls this client reports. The client gets no reply."""
        group = self._known.setdefault(name, _Group(text, tuple(members), limit_s))
        self._present[client].groups.append(group)
        return []

    def _on_signature(self, client: int, request: int, index: int, content: bytes) -> Outgoing:
        """Store a call's fingerprint; the client then refers to it by its index. The client gets no reply."""
        known = self._present[client].signatures
        # If a client restarts its numbering, new entries replace the old ones, so that this list does not grow forever.
        del known[index:]
        known.append(content)
        return []

    def _on_finish(self, client: int, request: int) -> Outgoing:
        """End the comparison for all ranks. The client gets no reply."""
        self._over = True
        return [answer for where, number, call in self._open() for answer in self._made(where, number, call)]

    def _on_bye(self, client: int, request: int) -> Outgoing:
        how = "has ended, or closed its watch. Did it make fewer calls?"
        # Remove the client from its groups first, so that it is not notified of calls that fail because it has left.
        return [*super()._on_bye(client, request), *self._end(client, how)]

    def lost(self, client: int, outage: str = "") -> Outgoing:
        # A process that gloo aborts because of a mismatch is lost before its mismatch has been compared.
        out = self._read_reports()
        if client not in self._present:
            return [*out, *super().lost(client, outage)]
        here = self._present[client]
        if here.pid:
            self._unclear[here.rank] = here.pid
        # Handle the loss like a goodbye, but drop the last reply, which would go to the lost client.
        out += super()._on_bye(client, 0)[:-1]
        # Check now: a process's exit status can be read only until its parent has reaped it.
        out += self._look_for_failed()
        return [*out, *self._end(client, f"was lost: {outage or 'its process has ended'}.")]

    def _end(self, client: int, how: str) -> Outgoing:
        here = self._present.pop(client, None)
        if here is None:
            return []
        self._gone[here.rank] = f"rank {here.rank} {how}"
        return self._look_for_gone()

    # -- calls -------------------------------------------------------------------------------------
    def called(self, client: int, content: bytes) -> Outgoing:
        """Record a reported call, in the format `CALL`. The client gets no reply."""
        return self._take(client, 0, *CALL.unpack(content))

    def _on_compare(self, client: int, request: int, content: bytes) -> Outgoing:
        """Record a call, and answer when all ranks have made it."""
        return self._take(client, request, *CALL.unpack(content))

    def _on_abandon(self, client: int, request: int, group: int, number: int) -> Outgoing:
        """Record that a call has failed on a rank, which no longer waits. The client gets no reply."""
        here = self._present[client]
        if call := here.groups[group].calls.get(number):
            call.abandoned.add(here.rank)
        return []

    def _take(self, client: int, request: int, group: int, number: int, same: int, signature: int, op: int) -> Outgoing:
        if self._over:
            return [(client, (request, "ok", None))] if request else []
        here = self._present[client]
        here.heard = self._now()
        where = here.groups[group]
        call = where.calls.setdefault(number, _Call(self._now()))
        call.made[here.rank] = _Made(same, here.signatures[signature], op)
        if request:
            call.asked.append((client, request))
        missing = self._missing_in(where, call)
        if missing:
            return self._look_for_gone() if self._gone.keys() & missing else []
        if call.differs or call.made[here.rank].fingerprint.sends:
            return self._compared(where, number, call)
        return self._made(where, number, call)

    def _made(self, where: _Group, number: int, call: _Call) -> Outgoing:
        """Drop a call that all ranks have made."""
        del where.calls[number]
        return [(other, (waiting, "ok", None)) for other, waiting in call.asked]

    def _compared(self, where: _Group, number: int, call: _Call) -> Outgoing:
        """Report a mismatch if the fingerprints of the ranks that have made a call differ."""
        prints = {rank: call.made[rank].fingerprint for rank in sorted(call.made)}
        if any(each.op is None for each in prints.values()):
            # The reduce operation of a C++ caller is unknown, and comparing it would report a difference.
            prints = {rank: each._replace(op=None) for rank, each in prints.items()}
        problem = explain(prints)
        if not problem:
            return self._made(where, number, call)
        sent = MAY_BE_WRONG
        if len(call.asked) == len(call.made):
            sent = NOTHING_SENT
        missing = self._missing_in(where, call)
        silent = f"; rank {min(missing)} has not made it" if missing else ""
        return self._fail("MismatchError", None, f"{problem}. This is call {number} of {where.text}{silent}. {sent}")

    def _fail(self, kind: str, rank: int | None, message: str) -> Outgoing:
        """Fail the world group, and all calls that are waiting to be compared."""
        cause = Cause(kind, rank, message)
        waiting = [asked for _, _, call in self._open() for asked in call.asked]
        for group in self._known.values():
            group.calls.clear()
        return [*self._groups.fail(self._world, cause), *((client, failed(at, cause)) for client, at in waiting)]

    # -- failures ----------------------------------------------------------------------------------
    def _on_fail(self, client: int, request: int, name: str, kind: str, rank: int | None, message: str) -> Outgoing:
        """Record an error that ends a rank; if another rank's exit caused it, wait for that rank's error."""
        if client in self._present and rank is not None and _BROKEN.search(message):
            self._victim = self._victim or (self._now(), rank, message)
            return [(client, (request, "ok", (kind, rank, message)))]
        return [*self._fail(kind, rank, message), *super()._on_fail(client, request, name, kind, rank, message)]

    def _on_fail_all(self, client: int, request: int, kind: str, message: str) -> Outgoing:
        return [*self._fail(kind, None, message), (client, (request, "ok", None))]

    def _on_examine(self, client: int, request: int, content: bytes) -> Outgoing:
        """Check for exits, deadlocks and overdue calls, given the encoded fields of each `BlockedRank`.

        The answer is whether all ranks have exited, whether a rank has reported nothing lately, and an overdue call.
        """
        blocked: list[BlockedRank] = []
        for fields in serialization.decode(content):
            # Check all of them before anything changes.
            check_form(_blocked_rank, "examine", fields)
            blocked.append(_blocked_rank(*fields))
        if self._over or self._groups.of(self._world).cause is not None:
            # Once the watch has reported a failure, the ranks remain blocked until they exit.
            blocked = []
        out = [*self._look_for_failed(), *self._look_for_cycle(blocked)]
        for where, number, call in self._open():
            if call.differs and self._now() - call.since > _OTHERS_S:
                out += self._compared(where, number, call)
        overdue = next(self._overdue(blocked), None)
        ended = not self._present and (bool(self._gone) or self._now() - self._began > _FIRST_WITHIN_S)
        quiet = any(self._now() - each.heard > _QUIET_S for each in self._present.values())
        return [*out, (client, (request, "ok", (ended, quiet, overdue and tuple(overdue))))]

    def _look_for_gone(self) -> Outgoing:
        """Fail if a call is waiting for a rank that has exited."""
        for _, _, call, needed in self._awaited():
            for rank in sorted(needed & self._gone.keys()):
                waiting, made = next(iter(call.waiting.items()))
                text = f"{self._gone[rank]} Rank {waiting} waits for it in {call_text(made.fingerprint)}"
                return self._fail("PeerLostError", rank, text)
        return []

    def _look_for_failed(self) -> Outgoing:
        """Fail if a rank's exit status shows a failure, or if the cause of an error has not been reported in time."""
        for rank, pid in list(self._unclear.items()):
            status = exit_status(pid)
            if status is None:
                continue
            del self._unclear[rank]
            if status:
                how = ended_by(-status) if status < 0 else f"ended with exit status {status}"
                return self._fail("PeerLostError", rank, f"rank {rank} {how}")
        if self._victim is None:
            return []
        since, victim, message = self._victim
        lost = next((rank for rank, how in self._gone.items() if "was lost" in how), None)
        if lost is None and self._now() - since < _CAUSE_S:
            return []
        self._victim = None
        if lost is not None:
            return self._fail("PeerLostError", lost, self._gone[lost])
        if self._gone:
            # The rank that reported the error may have been waiting for a message from a rank that has ended.
            ended, how = next(iter(self._gone.items()))
            return self._fail("PeerLostError", ended, f"{how} Then {message}")
        return self._fail("PeerLostError", victim, message)

    def _look_for_cycle(self, blocked: list[BlockedRank]) -> Outgoing:
        """Fail if ranks are waiting for each other, each in a call or message that it cannot leave."""
        waits: dict[int, list[int]] = {}
        texts: dict[int, str] = {}
        for each in blocked:
            where = self._known.get(each.group)
            if where is None or each.aside or each.for_s < _DEADLOCK_S:
                continue
            call = where.calls.get(each.number or 0)
            if each.number is None:
                waits[each.rank] = [*each.peers]
                texts[each.rank] = f"{each.call} of {where.text}"
            elif call is not None and each.rank in call.waiting:
                waits[each.rank] = sorted(self._needed(where, call))
                texts[each.rank] = f"{call_text(call.made[each.rank].fingerprint)} of {where.text}"
        cycle = find_cycle(waits)
        if not cycle:
            return []
        parts = (f"rank {rank} waits for rank {other} in {texts[rank]}" for rank, other in pairwise(cycle))
        return self._fail("DeadlockError", None, f"a deadlock: {'; '.join(parts)}. Change the order of their calls")

    def _overdue(self, blocked: list[BlockedRank]) -> Iterator[Overdue]:
        for where, number, call, needed in self._awaited():
            waited_s = self._now() - call.since
            if waited_s > where.limit_s:
                rank = min(needed)
                waiting, made = next(iter(call.waiting.items()))
                text = f"rank {waiting} has waited {waited_s:.1f} s for rank {rank} in {call_text(made.fingerprint)}"
                yield Overdue(rank, f"{text}, call {number} of {where.text}")
        for each in blocked:
            where_from = self._known.get(each.group)
            if each.number is None and where_from is not None and each.for_s > where_from.limit_s:
                peer = f" for rank {each.peers[0]}" if each.peers else ""
                text = f"rank {each.rank} has waited {each.for_s:.1f} s{peer} in {each.call} of {where_from.text}"
                yield Overdue(each.peers[0] if each.peers else None, text)

    # -- open calls ------------------------------------------------------------------------------
    def _open(self) -> Iterator[tuple[_Group, int, _Call]]:
        return ((group, *each) for group in list(self._known.values()) for each in list(group.calls.items()))

    def _awaited(self) -> Iterator[tuple[_Group, int, _Call, set[int]]]:
        """Yield the incomplete calls, each with the ranks that it needs."""
        for where, number, call in self._open():
            needed = self._needed(where, call)
            if needed and call.waiting:
                yield where, number, call, needed

    def _needed(self, where: _Group, call: _Call) -> set[int]:
        """Return the ranks without which no rank can complete the call."""
        made = next(iter(call.made.values())).fingerprint
        needed = self._missing_in(where, call)
        root = None if made.root is None else where.members[made.root]
        # In a broadcast, the root need not wait for the other ranks; in a reduce, the other ranks need not wait for the
        # root.
        if made.operation in _DOWN:
            return needed & {root}
        return set() if made.operation in _UP and root in needed else needed

    def _missing_in(self, where: _Group, call: _Call) -> set[int]:
        return {*where.members} - call.made.keys()


def _blocked_rank(
    rank: int, group: str, number: int | None, call: str, for_s: float, peers: list[int], aside: bool
) -> BlockedRank:
    """Return a `BlockedRank`, from fields that another process has sent."""
    return BlockedRank(rank, group, number, call, for_s, tuple(peers), aside)
