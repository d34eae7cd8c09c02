"""Hang reports: what each rank of the group is doing when a wait fails, and whether the ranks deadlock."""

from __future__ import annotations

from typing import Any, NamedTuple

from unisono.core.control import ControlPlane
from unisono.core.failure import with_notes_of
from unisono.core.flight_recorder import ALL_RANKS
from unisono.core.group import Group
from unisono.errors import CommError, CommTimeoutError, DeadlockError, MismatchError

__all__ = [
    "BlockedRank",
    "Hang",
    "blocked_ranks",
    "find_cycle",
    "hang_report",
    "last_calls",
    "lines_of",
    "sentence",
    "with_hang_report",
]

_Report = dict[str, Any]

_PATIENCE_S = 0.15
"""Seconds without an answer after which a rank counts as stopped."""

_MOST_RANKS = 16
_NAMED = 8
_NOTHING: _Report = {"calls": -1, "inside": False}
_CALLERS = 3
_FIELDS = ("operation", "call", "peer", "nbytes", "waited_s")
_SILENT = "does not answer: its process is stopped, or busy in code that blocks its other threads"


class Hang(NamedTuple):
    """What a query to all ranks revealed about a failed wait.

    Attributes:
        report: Lines that describe what each rank is doing, to append to an error's message.
        deadlock: Whether ranks wait for each other in a cycle: each waits for a collective or message that the next
            rank has not started.
        missing: Ranks that the collective waits for, as far as known: those that are in no call of the group; if there
            are none, those that do not respond; or else those that are still in an earlier call.
        verdict: `missing` as a sentence, or empty.
        waits: For each rank in the cycle, the group in which it waits, and the number of calls that it has made in that
            group.
    """

    report: str = ""
    deadlock: bool = False
    missing: tuple[int, ...] = ()
    verdict: str = ""
    waits: frozenset[tuple[str, int]] = frozenset()


class BlockedRank(NamedTuple):
    """A rank that is in a call.

    Attributes:
        rank: The rank.
        group: Name of the call's group.
        number: Sequence number of the call, or None for a message.
        call: The call as text.
        for_s: Seconds since the rank entered the call.
        peers: For a message, the ranks that have not posted the matching operation.
        aside: Whether the rank can make other calls even if this one never ends, in another thread or after the call's
            own timeout, so that it is not counted as part of a deadlock.
    """

    rank: int
    group: str
    number: int | None
    call: str
    for_s: float
    peers: tuple[int, ...]
    aside: bool


def blocked_ranks(found: dict[tuple[str, int], _Report | None]) -> list[BlockedRank]:
    """Return the ranks that are in a call, given the answers to a query to all ranks of one job."""
    reports = {rank: report for (_, rank), report in found.items()}
    world = Group.world(0, 1 + max(reports, default=0))
    return [
        BlockedRank(
            rank,
            current["group"],
            current["number"],
            current["call"],
            current["for_s"],
            tuple(_waits_for(rank, reports, world)) if current["awaited"] else (),
            current["aside"],
        )
        for rank, current in zip(reports, map(_inside, reports.values()), strict=True)
        if current is not None
    ]


def hang_report(control: ControlPlane, group: Group) -> Hang:
    """Ask all ranks what they are doing, and return the findings."""
    try:
        found = control.query(group, _PATIENCE_S)
    except CommError:
        return Hang(sentence(control.outage()))
    if not any(report and report.get("groups") for report in found.values()):
        # No rank has a communicator yet, so there is nothing to report.
        return Hang()
    reports = {rank: found.get((group.name, rank), {}) for rank in range(group.size)}
    circle = find_cycle({rank: _waits_for(rank, reports, group) for rank in reports})
    shown = sorted(reports, key=lambda rank: (_inside(reports[rank]) is not None, rank))[:_MOST_RANKS]
    lines = [line for rank in sorted(shown) for line in lines_of(f"rank {rank}", reports[rank])]
    if len(reports) > len(shown):
        lines.append(f"(and {len(reports) - len(shown)} ranks more)")
    if circle:
        first, *others = (f"rank {rank}" for rank in circle)
        lines.insert(
            0, f"a deadlock: {first} waits for {', which waits for '.join(others)}; change the order of their calls"
        )
    waits = frozenset(
        (current["group"], current["calls"] + sum(count for *_, count in current["posted"]))
        for current in map(_inside, map(reports.get, circle))
        if current
    )
    # Show one outage per host: reports from ranks on the same host differ only by tenths of a second.
    outages = {text.partition(" not ")[0]: text for r in reports.values() if r and (text := r.get("outage"))}
    report = sentence("; ".join(outages.values())) + "".join(f"\n  {line}" for line in lines)
    return Hang(report, bool(circle), *_verdict(reports, group), waits)


def sentence(outage: str) -> str:
    """Return an outage's description as a sentence to append to an error; empty if `outage` is empty."""
    return f" {outage[0].upper()}{outage[1:]}" if outage else ""


def last_calls(control: ControlPlane, group: Group) -> str:
    """Return each rank's last calls, as lines to append to an error's message."""
    try:
        found = control.query(group, _PATIENCE_S)
    except CommError:
        return ""
    return "".join(
        f"\n  the last calls of rank {rank}: {', then '.join(entry['last'])}"
        for (_, rank), report in list(found.items())[:_MOST_RANKS]
        for entry in (report or {}).get("groups", ())
        if entry["group"] == group.name and entry["last"]
    )


def with_hang_report(error: BaseException, control: ControlPlane, group: Group) -> BaseException:
    """Add each rank's state to a timeout error, or its last calls to a mismatch error.

    If ranks deadlock, a timeout error becomes a `DeadlockError`. Cost: one query to all ranks, which takes 0.15 s
    longer if a process is stopped.
    """
    if not isinstance(error, CommError) or "\n" in str(error) or group.size == 1:
        return error
    if isinstance(error, DeadlockError) and group.size > _MOST_RANKS:
        # The simulator raised this error, and its message already names the deadlocked ranks; querying this many ranks
        # would take too long.
        return error
    if isinstance(error, MismatchError):
        error.message += last_calls(control, group)
    elif isinstance(error, CommTimeoutError):
        hang = hang_report(control, group)
        if error.peer is None and hang.missing:
            error.peer = hang.missing[0]
            error.message += f": {hang.verdict}"
        error.message += hang.report
        if hang.deadlock:
            found = DeadlockError(error.message, **{name: getattr(error, name) for name in _FIELDS})
            return with_notes_of(error, found)
    return error


def lines_of(name: str, report: _Report | None) -> list[str]:
    """Return a line about what a rank is doing, and, if it is in no call, a few lines of its thread's stack."""
    if report is None:
        return [f"{name} {_SILENT}"]
    if not report:
        return [f"{name} is gone"]
    if "outage" in report:
        return [f"{name} does not answer: {report['outage']}"]
    at = (
        f"its thread is at {report['site']} in {report['function']}"
        if report["site"]
        else "its thread has ended, or was released"
    )
    current = _inside(report)
    if current is not None:
        elsewhere = f"; {at}" if current["aside"] or f" at {report['site']}" not in current["call"] else ""
        how = "has just given up in" if current["gave_up"] else "is in"
        group = Group(current["group"], current["rank"], tuple(current["members"])).text
        return [f"{name} {how} {current['call']}, in group {group}, for {current['for_s']:.1f} s{elsewhere}"]
    stack = [f"    called by {line}" for line in reversed(report["callers"][-_CALLERS:])]
    latest = report["groups"][-1] if report["groups"] else None
    if latest is None or latest["call"] is None:
        return [f"{name} has made no call; {at}", *stack]
    return [f"{name} is in no call, for {latest['for_s']:.1f} s; its last was {latest['call']}; {at}", *stack]


def _inside(report: _Report | None) -> _Report | None:
    """Return the report on the communicator in which a rank waits (the last one entered, if it waits in several)."""
    inside = [entry for entry in (report or {}).get("groups", ()) if entry["inside"]]
    return inside[-1] if inside else None


def find_cycle(waits: dict[int, list[int]]) -> list[int]:
    """Return a cycle of ranks that wait for each other, with the first rank repeated at the end; empty if none.

    Args:
        waits: For each rank, the ranks that it cannot continue without.

    Example:
        >>> find_cycle({0: [1], 1: [3, 2], 2: [1]}), find_cycle({0: [1], 1: []})
        ([1, 2, 1], [])
    """
    waits = dict(waits)

    def search(path: list[int]) -> list[int]:
        for rank in waits.get(path[-1], ()):
            found = [*path[path.index(rank) :], rank] if rank in path else search([*path, rank])
            if found:
                return found
        # No path from this rank leads to a cycle, so do not search from it again.
        waits[path[-1]] = []
        return []

    return next(filter(None, (search([start]) for start in list(waits))), [])


def _waits_for(rank: int, reports: dict[int, _Report | None], group: Group) -> list[int]:
    """Return which ranks of the group block the given rank."""
    current = _inside(reports[rank])
    if current is None or current["aside"]:
        return []
    if current["awaited"]:
        found = [
            peer
            for kind, to, tag, number in current["awaited"]
            for peer in (range(len(current["members"])) if to == ALL_RANKS else [to])
            if _not_posted(reports, current, peer, _counterpart(current, kind, to, tag), number)
        ]
    elif current["number"] is not None:
        found = [peer for peer in range(len(current["members"])) if _is_behind(reports, current, peer)]
    else:
        found = []
    numbers = [current["members"][peer] for peer in found]
    return [group.members.index(number) for number in numbers if number in group.members]


def _verdict(reports: dict[int, _Report | None], group: Group) -> tuple[tuple[int, ...], str]:
    """Return the ranks that this rank's current collective waits for, and a sentence about them."""
    calls = {rank: _of(reports, group.members[rank], group.name) for rank in range(group.size)}
    mine = calls[group.rank]
    if mine is None or not mine["inside"] or mine["number"] is None:
        return (), ""
    silent = [rank for rank in calls if "groups" not in (reports[rank] or {})]
    behind = [rank for rank in calls if rank not in silent and (calls[rank] or _NOTHING)["calls"] < mine["number"]]
    elsewhere = [rank for rank in behind if not (calls[rank] or _NOTHING)["inside"]]
    if silent and not elsewhere:
        one = "does not answer. Is it stopped, or gone?"
        several = "do not answer. Are they stopped, or gone?"
    else:
        one = "has not arrived. Is it alive, or did it skip a call?"
        several = "have not arrived. Are they alive, or did they skip a call?"
    missing = tuple(elsewhere or silent or behind)
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    named = ", ".join(map(str, missing[:_NAMED]))
    return missing, f"ranks {named}{more} {several}" if len(missing) > 1 else f"rank {named} {one}" if missing else ""


def _of(reports: dict[int, _Report | None], number: int, name: str) -> _Report | None:
    """Return a rank's report on one of its groups. `number` is the rank's number in the job."""
    for answer in reports.values():
        for entry in (answer or {}).get("groups", ()):
            if entry["group"] == name and entry["members"][entry["rank"]] == number:
                found: _Report = entry
                return found
    return None


def _is_behind(reports: dict[int, _Report | None], current: _Report, peer: int) -> bool:
    """Return whether the peer has yet to reach the collective that this rank is in."""
    entry = _of(reports, current["members"][peer], current["group"])
    return entry is not None and peer != current["rank"] and bool(entry["calls"] < current["number"])


def _counterpart(current: _Report, kind: str, to: int, tag: int) -> tuple[str, int, int]:
    """Return the key of the operation that a peer must post to match this rank's message."""
    if to == ALL_RANKS:
        return kind, to, tag
    return "recv" if kind == "send" else "send", current["rank"], tag


def _not_posted(
    reports: dict[int, _Report | None], current: _Report, peer: int, key: tuple[str, int, int], number: int
) -> bool:
    """Return whether the peer has posted fewer than `number` messages with this key."""
    entry = _of(reports, current["members"][peer], current["group"])
    if entry is None:
        return False
    posted = {(k, p, t): count for k, p, t, count in entry["posted"]}
    return bool(posted.get(key, 0) < number)
