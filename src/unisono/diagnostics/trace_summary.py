"""Summary of a trace: exposed communication, overlap, and the rank that all others wait for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from statistics import mean, median
from typing import Any

from unisono.diagnostics.trace_file import check_trace

__all__ = ["find_straggler", "format_summary", "summarize"]

_Json = dict[str, Any]


def summarize(document: _Json) -> _Json:
    """Return a summary of a trace as plain values. Times are in seconds.

    Exposed time is the time that the program's thread spends in calls and waits. Overlap is the fraction of the
    communication time during which the thread is not in a call or wait. The skew of a collective is the time from the
    first rank's call to the last rank's call. The straggler is the rank that `find_straggler` returns. A rank waits for
    a core if more threads are ready to run than the host has cores.

    Args:
        document: The parsed content of a file that `unisono.trace` wrote.

    Raises:
        ValueError: The document is not a trace from `unisono.trace`, or it has no spans.

    Example:
        >>> def call(rank, ts):
        ...     return {"name": "barrier", "cat": "collective", "ph": "X", "pid": rank, "tid": 0, "ts": ts,
        ...             "dur": 9e6 - ts, "args": {"group": "world", "nbytes": 0, "call": 1, "site": "train.py:7"}}
        >>> found = summarize({"traceEvents": [call(0, 0.0), call(1, 2e6)]})
        >>> found["collectives"][0]["last"], found["collectives"][0]["mean_skew_s"], found["straggler"]
        ({'1': 1}, 2.0, None)
    """
    check_trace(document)
    spans = [e for e in document["traceEvents"] if e["ph"] == "X" and "group" in (e.get("args") or {})]
    by_rank: dict[int, list[_Json]] = defaultdict(list)
    for event in spans:
        by_rank[event["pid"]].append(event)
    calls = _matched(e for e in spans if e["cat"] == "collective")
    buckets = _matched(e for e in spans if e["cat"] == "bucket")
    core_waits = _core_waits(document["traceEvents"])
    ranks = [_rank(rank, found) | {"core_wait_s": core_waits.get(rank)} for rank, found in sorted(by_rank.items())]
    if not ranks:
        raise ValueError("no span of unisono is in it; pass a file of unisono.trace")
    uncertainty = document.get("otherData", {}).get("clock_uncertainty_us", 0.0)
    return {
        "ranks": ranks,
        "buckets": _arrivals(buckets),
        "collectives": _arrivals(calls),
        "straggler": find_straggler({**buckets, **calls}, core_waits),
        "clock_uncertainty_s": uncertainty / 1e6,
    }


def _core_waits(events: Iterable[_Json]) -> dict[int, float]:
    """Return how long each rank waited for a core; leave out ranks for which this is unknown."""
    named = [event for event in events if event["ph"] == "M" and isinstance(event.get("args"), dict)]
    waits = [(event.get("pid"), event["args"].get("core_wait_us")) for event in named]
    return {rank: us / 1e6 for rank, us in waits if isinstance(rank, int) and isinstance(us, (int, float))}


def _rank(rank: int, events: Sequence[_Json]) -> _Json:
    waits = _union(e for e in events if e["cat"] in ("wait", "bucket_wait"))
    communication = _union(e for e in events if e["cat"] in ("collective", "send", "recv"))
    both = _length(waits) + _length(communication) - _length(_joined([*waits, *communication]))
    total = _length(communication)
    return {
        "rank": rank,
        "time_s": (max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)) / 1e6,
        "communication_s": total / 1e6,
        "exposed_s": _length(waits) / 1e6,
        "overlap": max(0.0, 1 - both / total) if total else 0.0,
        "calls": sum(e["cat"] == "collective" for e in events),
        "nbytes": sum(e["args"]["nbytes"] for e in events if e["cat"] in ("collective", "send", "recv")),
    }


def _matched(events: Iterable[_Json]) -> dict[str, list[dict[int, float]]]:
    """Return when each rank started a collective or bucket, by name and source line; skip those of a single rank."""
    found: dict[tuple[str, Any], dict[int, float]] = defaultdict(dict)
    names: dict[tuple[str, Any], str] = {}
    times: Counter[tuple[int, str]] = Counter()
    for event in sorted(events, key=lambda event: event["ts"]):
        rank = event["pid"]
        name = event["name"]
        detail = event["args"]
        label = f"{name} of {detail['group']}" if event["cat"] == "bucket" else name
        times[rank, label] += 1
        key = label if event["cat"] == "bucket" else detail["group"], detail.get("call", times[rank, label])
        found[key][rank] = event["ts"]
        site = detail.get("site")
        names.setdefault(key, f"{name} at {site}" if site else name)
    by_name: dict[str, list[dict[int, float]]] = defaultdict(list)
    for key, arrivals in found.items():
        if len(arrivals) > 1:
            by_name[names[key]].append(arrivals)
    return by_name


def _arrivals(matched: dict[str, list[dict[int, float]]]) -> list[_Json]:
    rows = []
    for name, each in matched.items():
        skews = [(max(arrivals.values()) - min(arrivals.values())) / 1e6 for arrivals in each]
        last = Counter(str(max(arrivals, key=arrivals.__getitem__)) for arrivals in each)
        rows.append(
            {
                "name": name,
                "count": len(each),
                "mean_skew_s": mean(skews),
                "max_skew_s": max(skews),
                "last": dict(last.most_common()),
            }
        )
    return rows


def _union(events: Iterable[_Json]) -> list[tuple[float, float]]:
    return _joined([(event["ts"], event["ts"] + event["dur"]) for event in events])


def _joined(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of intervals, as disjoint intervals."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)


def format_summary(found: _Json) -> str:
    """Return a summary as text."""
    lines = ["rank       time  communication    exposed  overlap  collectives        bytes  waits for a core"]
    lines += [
        f"{rank['rank']:4} {_ms(rank['time_s'])} {_ms(rank['communication_s']):>14} {_ms(rank['exposed_s'])} "
        f"{rank['overlap']:8.0%} {rank['calls']:12} {rank['nbytes']:12} {_ms(rank['core_wait_s']):>17}"
        for rank in found["ranks"]
    ]
    for title in ("buckets", "collectives"):
        rows = sorted(found[title], key=lambda row: -row["count"] * row["mean_skew_s"])[:12]
        if rows:
            lines += ["", f"{title}: times called, mean and maximum skew, and which rank is last"]
        for row in rows:
            last = ", ".join(f"rank {rank}: {count}" for rank, count in row["last"].items())
            skew = f"{_ms(row['mean_skew_s'])} {_ms(row['max_skew_s'])}"
            lines.append(f"{row['count']:6} {skew}  {last:32}  {row['name']}")
        if len(found[title]) > len(rows):
            lines.append(f"  and {len(found[title]) - len(rows)} more, of less skew")
    one = found["straggler"]
    waited = "no rank is late more often than by chance"
    if one is not None:
        waited = f"rank {one['rank']} is the last at {one['last']} of {one['of']} calls of {one['where']}, "
        waited += f"late by {one['late_s'] * 1e3:.1f} ms; the others wait {one['waited_s'] * 1e3:.1f} ms for it"
    error = found["clock_uncertainty_s"] * 1e6
    return "\n".join([*lines, "", f"{waited} (clocks aligned to {error:.0f} us)"])


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:7.1f} ms"


_CALLS = 5
_DEVIATIONS = 4.5
_LATER_THAN = 0.75
_SHARE_OF_STEP = 0.02
_STEADY_SHARE = 0.08


def find_straggler(
    places: Mapping[str, Sequence[Mapping[int, float]]], core_waits: Mapping[int, float] | None = None
) -> dict[str, Any] | None:
    """Return the rank, if any, that is late at one place in the program more often than chance explains.

    A place is a bucket or a source line; places with fewer than 5 calls are ignored. On average, a straggler arrives
    after at least three quarters of the other ranks, and at least 4.5 standard deviations later than in a random order.
    If the calls are too few to reach 4.5, a straggler must be the last rank in every call. Its median lateness is at
    least 2 % of the time between calls.

    With few calls, or with only two ranks, the order alone proves too little, so three stricter conditions apply: the
    median lateness is at least 8 % of the time between calls; in four of five calls, the lateness is at least half the
    median; and the total time that all other ranks waited for the straggler exceeds the time that it waited for a core.
    The last condition is needed because two ranks that share cores may always run in the same order.

    Args:
        places: For each place's name, a list of calls; each call maps ranks to their arrival times in microseconds.
        core_waits: Seconds that each rank waited for a core, if known.

    Returns:
        The straggler with the greatest total lateness, or None. The keys are "rank", "where" (the place), "last"
        (number of calls in which the rank was last), "of" (number of calls), "late_s" (median lateness), and "waited_s"
        (total time that all other ranks waited for it).

    Example:
        >>> steps = [{0: 1e4 * step, 1: 1e4 * step + 5e3} for step in range(20)]
        >>> find_straggler({"all_reduce": steps})
        {'rank': 1, 'where': 'all_reduce', 'last': 20, 'of': 20, 'late_s': 0.005, 'waited_s': 0.1}
    """
    found = []
    for where, calls in places.items():
        for rank in sorted({rank for call in calls for rank in call}):
            own = [call for call in calls if rank in call and len(call) > 1]
            if len(own) >= _CALLS and _is_late(rank, own, (core_waits or {}).get(rank, 0.0)):
                found.append((_lateness(rank, own) * len(own), rank, where, own))
    if not found:
        return None
    _, rank, where, own = max(found, key=lambda each: each[0])
    leads = [call[rank] - max(_others(rank, call)) for call in own]
    return {
        "rank": rank,
        "where": where,
        "last": sum(lead > 0 for lead in leads),
        "of": len(own),
        "late_s": round(_lateness(rank, own) / 1e6, 9),
        "waited_s": round(sum(lead for lead in leads if lead > 0) / 1e6, 9),
    }


def _is_late(rank: int, calls: Sequence[Mapping[int, float]], core_wait_s: float) -> bool:
    scores = [_score(rank, call) for call in calls]
    # If the arrival order were random, a rank's score would have mean 1/2 and variance (n + 1) / (12 (n - 1)) for n
    # ranks. `deviation` is the standard deviation of the sum of scores.
    deviation = sqrt(sum((len(call) + 1) / (12 * (len(call) - 1)) for call in calls))
    most = len(calls) / 2 / deviation
    if (sum(scores) - len(calls) / 2) / deviation < min(_DEVIATIONS, most) * (1 - 1e-9):
        return False
    if sum(scores) < _LATER_THAN * len(calls):
        return False
    late = sorted(_late(rank, call) for call in calls)
    starts = sorted(call[rank] for call in calls)
    share = median(late) / max((starts[-1] - starts[0]) / (len(calls) - 1), 1e-3)
    if most >= _DEVIATIONS and min(map(len, calls)) > 2:
        return share >= _SHARE_OF_STEP
    leads = (call[rank] - max(_others(rank, call)) for call in calls)
    if sum(lead for lead in leads if lead > 0) <= core_wait_s * 1e6:
        return False
    return share >= _STEADY_SHARE and late[(len(calls) - 1) // 5] >= median(late) / 2


def _score(rank: int, call: Mapping[int, float]) -> float:
    """Return the fraction of the other ranks that arrived before the given rank; a tie counts half."""
    others = _others(rank, call)
    return sum((call[rank] > other) + (call[rank] == other) / 2 for other in others) / len(others)


def _lateness(rank: int, calls: Sequence[Mapping[int, float]]) -> float:
    return median(_late(rank, call) for call in calls)


def _late(rank: int, call: Mapping[int, float]) -> float:
    return call[rank] - median(_others(rank, call))


def _others(rank: int, call: Mapping[int, float]) -> list[float]:
    return [arrival for other, arrival in call.items() if other != rank]
