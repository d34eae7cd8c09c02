"""Finds the rank that slows down the other ranks, from the time that each rank spends outside the library's calls."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import sqrt
from statistics import median
from typing import Any, NamedTuple

import torch.utils.data

from unisono.core import clock
from unisono.core.flight_recorder import (
    Activity,
    is_internal,
    is_users,
    site_of,
    site_text,
    thread_frames,
    users_frame,
    with_callers,
)
from unisono.core.types import CommunicatorLike
from unisono.host.processors import core_wait_s

__all__ = ["SlowRank"]

_log = logging.getLogger("unisono")

_BLOCKS = 20
"""Number of blocks into which the latest calls are divided; each block counts as one observation."""
_FEWEST = 100
"""Minimum number of calls considered, even if fewer were made since the last query."""
_SAMPLES_EVERY_S = 0.005
_SAMPLES_KEPT = 4096
"""Number of samples kept, which cover 20 seconds."""
_DEVIATIONS = 4.0
_LOADER = os.path.dirname(torch.utils.data.__file__) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OF_CALLS = tuple(_PACKAGE + name for name in ("comm", "core", "collectives", "control", "rpc", "transports"))

_Doing = Counter[tuple[str, str]]
"""Samples of a thread, by activity ("computing", "in a collective", "in the loader", "waiting") and line."""


class _Part(NamedTuple):
    """One rank's data: for each call, its number, its time, and the time spent outside calls before it."""

    numbers: list[int]
    times: list[float]
    outside: list[float]
    core_wait_share: float
    doing: list[tuple[str, str, int]]


class SlowRank:
    """Finds the rank that slows down the other ranks of one communicator.

    A rank that is late to a collective has spent more time outside calls than the other ranks, which have been waiting
    inside the call. So it suffices to record how long each rank was outside calls before each of its latest calls: no
    clocks are compared, and it does not matter whether calls block. `find_straggler` gets each rank's total time
    outside calls in each of 20 blocks of calls.

    While a slow rank is known, each rank samples the stack of its calling thread 200 times a second. The activity that
    is more frequent on the slow rank than on the other ranks is reported as the cause.

    Args:
        activity: The communicator's activity.
    """

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._since = clock.now(), core_wait_s()
        self._until = 0
        self._samples: _StackSamples | None = None
        self._named: tuple[int, str | None] | None = None

    def metrics(self, comm: CommunicatorLike) -> dict[str, Any]:
        """Return the figures for the latest calls, as in `Communicator.metrics`. Collective."""
        activity = self._activity
        oldest = min(self._until, activity.calls - _FEWEST)
        records = [record for record in activity.latest if record[1] is not None and record[1] >= oldest]
        part = _Part(
            [record[1] or 0 for record in records],
            [record[4] for record in records],
            [record[5] for record in records],
            self._core_wait_share(comm.backend == "sim"),
            [] if self._samples is None else self._samples.since(oldest),
        )
        # Send a list: encoding it takes half as long as encoding a named tuple.
        parts = comm.gather_object(comm._engine.measured("times of calls", lambda: list(part)))
        found: dict[str, Any] | None = None
        if parts is not None:
            names = {record[1]: _name(record[0], site_text(record[3])) for record in records}
            # Pass the figures through `measured`, because they depend on call stacks and source lines, which a replay
            # does not have.
            found = comm._engine.measured("a slow rank", lambda: _figures([_Part(*each) for each in parts], names))
            # The time that this method took must not be attributed to the program.
            activity.since = clock.now()
        report: dict[str, Any] = comm.broadcast_object(found, 0)
        self._until = activity.calls
        self._follow(report["straggler"], comm)
        return report

    def _core_wait_share(self, simulated: bool) -> float:
        """Return the fraction of the time since the last call that this thread spent waiting for a CPU core."""
        begun_s, before_s = self._since
        now_s = clock.now()
        waited_s = core_wait_s()
        self._since = now_s, waited_s
        if simulated or before_s is None or waited_s is None:
            return 0.0
        return max(0.0, waited_s - before_s) / max(now_s - begun_s, 1e-9)

    def _follow(self, straggler: Mapping[str, Any] | None, comm: CommunicatorLike) -> None:
        """Log when another rank becomes the slow rank, and sample stacks for as long as there is a slow rank."""
        named = None if straggler is None else (straggler["rank"], straggler["doing"])
        if straggler is not None and named != self._named and comm.rank == 0:
            _log.warning("%s", _sentence(straggler))
        other = named is None or self._named is None or named[0] != self._named[0]
        self._named = named
        if other and self._samples is not None:
            self._samples.stop()
            self._samples = None
        # Don't sample in a simulation, where the sampling thread would take turns with the simulated ranks.
        if other and named is not None and comm.backend != "sim":
            self._samples = _StackSamples(self._activity)


class _StackSamples:
    """Stack samples of the thread that makes a communicator's calls, until `stop` or the end of the communicator."""

    def __init__(self, activity: Activity) -> None:
        self._activity = weakref.ref(activity)
        self._samples: deque[tuple[int, str, str]] = deque(maxlen=_SAMPLES_KEPT)
        self._over = threading.Event()
        threading.Thread(target=self._run, name="unisono samples", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._over.set()

    def since(self, call: int) -> list[tuple[str, str, int]]:
        """Return how often each activity and line has been sampled since the call with number `call`."""
        counts = Counter((doing, line) for calls, doing, line in self._samples.copy() if calls >= call)
        return [(doing, line, count) for (doing, line), count in counts.items()]

    def _run(self) -> None:
        while not self._over.wait(_SAMPLES_EVERY_S):
            activity = self._activity()
            if activity is None or activity.life.closed or activity.life.cause:
                return
            self._samples.append((activity.calls, *_doing(activity)))


def _doing(activity: Activity) -> tuple[str, str]:
    """Return the activity of the thread that owns the communicator, and its line in the user's program."""
    if activity.inside:
        return "waiting", ""
    frame = thread_frames().get(activity.owner)
    line = site_of(users_frame(frame)) or ""
    found = None
    for each in with_callers(frame):
        name = each.f_code.co_filename
        if name.startswith(_LOADER):
            return "in the loader", line
        if found is None and (is_internal(name) or is_users(name)):
            found = "in a collective" if name.startswith(_OF_CALLS) else "computing"
    return found or "computing", line


def _name(operation: str, site: str | None) -> str:
    return f"{operation} at {site}" if site else operation


def _figures(parts: Sequence[_Part], names: Mapping[int | None, str]) -> dict[str, Any]:
    """Return statistics on the calls that are still recorded on all ranks, as in `Communicator.metrics`."""
    common = sorted(set(parts[0].numbers).intersection(*(part.numbers for part in parts)))
    places = [{number: place for place, number in enumerate(part.numbers)} for part in parts]
    outside = [[part.outside[place[n]] for n in common] for part, place in zip(parts, places, strict=True)]
    times = [parts[0].times[places[0][number]] for number in common]
    seconds = times[-1] - times[0] if times else 0.0
    return {
        "calls": len(common),
        "seconds": seconds,
        "outside_s": [each[-1] - each[0] if each else 0.0 for each in outside],
        "straggler": _straggler(parts, outside, times, [names[number] for number in common]),
    }


def _straggler(
    parts: Sequence[_Part], outside: Sequence[Sequence[float]], times: Sequence[float], names: Sequence[str]
) -> dict[str, Any] | None:
    """Return the rank that slows down the other ranks, with location, delay and activity; None if there is none."""
    from unisono.diagnostics.trace_summary import find_straggler

    calls = len(times) - 1
    if calls < _BLOCKS or len(parts) == 1:
        return None
    seconds = times[-1] - times[0]
    blocks = []
    for first, last in pairwise(calls * block // _BLOCKS for block in range(_BLOCKS + 1)):
        spent = {rank: each[last] - each[first] for rank, each in enumerate(outside)}
        blocks.append({rank: (times[first] + spent_s) * 1e6 for rank, spent_s in spent.items()})
    waits = {rank: part.core_wait_share * seconds for rank, part in enumerate(parts)}
    found = find_straggler({"": blocks}, waits)
    if found is None:
        return None
    rank = found["rank"]
    before = [[later - earlier for earlier, later in pairwise(each)] for each in outside]
    late: Counter[str] = Counter()
    for name, *spent_s in zip(names[1:], *before, strict=True):
        late[name] += spent_s[rank] - median(_others(rank, spent_s))
    late_s = sum(late.values())
    doing, line = _excess(rank, [Counter({(d, at): count for d, at, count in part.doing}) for part in parts])
    return {
        "rank": rank,
        "where": max(late, key=lambda name: late[name]),
        "late_s": late_s,
        "share": late_s / seconds,
        "doing": doing,
        "line": line,
    }


def _excess(rank: int, counts: Sequence[_Doing]) -> tuple[str | None, str | None]:
    """Return the activity and line seen significantly more often on a rank than on the other ranks, or None."""
    if not all(counts):
        return None, None
    totals = [count.total() for count in counts]
    kinds = [Counter[str]() for _ in counts]
    for count, kind in zip(counts, kinds, strict=True):
        for (doing, _), number in count.items():
            kind[doing] += number
    more = {d: _more(rank, [kind[d] for kind in kinds], totals) for d in kinds[rank] if d != "waiting"}
    if max(more.values(), default=0.0) < _DEVIATIONS:
        return None, None
    doing = max(more, key=lambda d: more[d])
    lines = {key for key in counts[rank] if key[0] == doing}
    return doing, max(lines, key=lambda key: _more(rank, [count[key] for count in counts], totals))[1] or None


def _more(rank: int, seen: Sequence[int], totals: Sequence[int]) -> float:
    """Return by how many standard deviations a rank's count exceeds the median count of the other ranks."""
    shares = [count / total for count, total in zip(seen, totals, strict=True)]
    usual = median(_others(rank, shares))
    both = (shares[rank] + usual) / 2
    deviation = sqrt(max(both * (1 - both), 1e-6) * (1 / totals[rank] + 1 / min(totals)))
    return (shares[rank] - usual) / deviation


def _others(rank: int, values: Sequence[float]) -> list[float]:
    return [value for other, value in enumerate(values) if other != rank]


def _sentence(straggler: Mapping[str, Any]) -> str:
    """Return the text to log."""
    doing = "" if straggler["doing"] is None else f". It is {straggler['doing']} then"
    at = "" if straggler["line"] is None else f", at {straggler['line']}"
    share = f"{straggler['share']:.1%} of the time"
    return f"rank {straggler['rank']} holds up the others for {share}, before {straggler['where']}{doing}{at}"
