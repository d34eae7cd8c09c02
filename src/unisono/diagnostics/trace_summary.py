"""Figures of a trace: exposed communication, overlap, and which ranks the others wait for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import mean
from typing import Any

from unisono.diagnostics.straggler import find_straggler
from unisono.diagnostics.trace_file import check_trace

__all__ = ["format_summary", "summarize"]

_Json = dict[str, Any]


def summarize(document: _Json) -> _Json:
    """Return the figures of a trace as plain values. Times are in seconds.

    Exposed is the time that the program's thread spends in calls and waits; overlap is the fraction of the
    communication that runs at other times. The skew of a collective is the time from the first rank's call to the last
    one's. A straggler is a rank that `find_straggler` names.
    Ranks wait for a core while they could run, where there are more of them, or other programs, than cores.

    Args:
        document: The content of a file of `unisono.trace`.

    Raises:
        ValueError: It is no such document, or has no spans.

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
    """Return how long ranks waited for a processor, where it is known."""
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
    """Return, by name and line, when each rank called each collective, or began each bucket, of several ranks."""
    found: dict[tuple[str, Any], dict[int, float]] = defaultdict(dict)
    names: dict[tuple[str, Any], str] = {}
    times: Counter[tuple[int, str]] = Counter()
    for event in sorted(events, key=lambda event: event["ts"]):
        rank, name, detail = event["pid"], event["name"], event["args"]
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
        skews = [_skew(arrivals) for arrivals in each]
        last = Counter(str(_last(arrivals)) for arrivals in each)
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


def _last(arrivals: dict[int, float]) -> int:
    return max(arrivals, key=arrivals.__getitem__)


def _skew(arrivals: dict[int, float]) -> float:
    return (max(arrivals.values()) - min(arrivals.values())) / 1e6


def _union(events: Iterable[_Json]) -> list[tuple[float, float]]:
    return _joined([(event["ts"], event["ts"] + event["dur"]) for event in events])


def _joined(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of intervals, as disjoint ones."""
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
