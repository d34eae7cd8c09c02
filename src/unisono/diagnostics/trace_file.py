"""Events of all ranks as one document in the trace-event format, which Perfetto and chrome://tracing open.

The format is described in "Trace Event Format", Google, 2016. Complete events ("X") are the spans, metadata events
("M") name the processes (ranks) and threads (rows), and flow events ("s", "f") are the arrows from a send to its
receive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.core.tracing import TraceEvent

__all__ = ["ROWS", "Json", "check_trace", "merged", "rank_events"]

Json = dict[str, Any]

ROWS = ("wait", "bucket", "collective", "message")
"""Rows of a rank, from the top. Spans that overlap without nesting are put in additional rows with the same title."""

_TITLES = {"wait": "calls and waits", "bucket": "buckets", "collective": "collectives", "message": "messages"}
_OF_KIND = {
    "bucket_wait": "wait",
    "begin": "collective",
    "cost_table": "collective",
    "send": "message",
    "recv": "message",
}
_MOST_LANES = 1000
_SPAN: dict[str, Any] = {"name": str, "cat": str, "ts": (int, float), "dur": (int, float), "pid": int, "tid": int}
_ARGS: dict[str, Any] = {"group": str, "nbytes": int}


def rank_events(
    events: Iterable[TraceEvent], host: str, pid: int, clock: Callable[[float], float], core_wait_s: float | None = None
) -> list[Json]:
    """Return a rank's spans, and metadata events that name its rows.

    Args:
        events: Events of the rank.
        host, pid: Host and process ID of the rank, which are shown in its title.
        clock: Function that converts seconds on this rank's clock to rank 0's.
        core_wait_s: Total time that the rank waited for a core, if known; stored in the event that names the process.
    """
    found: list[Json] = []
    lanes: dict[str, list[list[float]]] = {row: [] for row in ROWS}
    for event in sorted(events, key=lambda event: (event.start_s, -event.end_s)):
        row = _OF_KIND.get(event.kind, event.kind)
        lane = _lane(lanes[row], event)
        name = f"begin {event.name}" if event.kind == "begin" else event.name
        start = clock(event.start_s) * 1e6
        end = clock(event.end_s) * 1e6
        found.append(
            {
                "name": name,
                "cat": event.kind,
                "ph": "X",
                "ts": round(start, 3),
                "dur": round(max(0.0, end - start), 3),
                "pid": event.world_rank,
                "tid": ROWS.index(row) * _MOST_LANES + lane,
                "args": {"group": event.group, "nbytes": event.nbytes, **event.detail},
            }
        )
    for rank in sorted({event["pid"] for event in found}):
        process = _named("process_name", rank, 0, f"rank {rank} ({host}, process {pid})")
        if core_wait_s is not None:
            process["args"]["core_wait_us"] = round(core_wait_s * 1e6, 3)
        found.append(process)
        tids = sorted({event["tid"] for event in found if event["pid"] == rank and event["ph"] == "X"})
        found += [_named("thread_name", rank, tid, _TITLES[ROWS[tid // _MOST_LANES]]) for tid in tids]
    return found


def merged(parts: Iterable[Sequence[Json]], other: Json | None = None) -> Json:
    """Return several ranks' events as one document, with an arrow for each message whose two ends are known.

    Args:
        parts: Results of `rank_events`, or events of existing documents.
        other: Further information about the trace.
    """
    spans = [event for part in parts for event in part if event["ph"] in "XM"]
    sends, receives = (
        {event["args"]["flow"]: event for event in spans if event.get("cat") == kind and "flow" in event["args"]}
        for kind in ("send", "recv")
    )
    flows: list[Json] = []
    for number, (flow, send) in enumerate(sends.items(), 1):
        if (receive := receives.get(flow)) is not None:
            # A viewer attaches an arrow's end to the span that encloses it, so the arrow must end just before the
            # receive does.
            end = receive["ts"] + max(0.0, receive["dur"] - 0.001)
            flows.append(_end_of_flow("s", number, send, send["ts"]))
            flows.append(_end_of_flow("f", number, receive, round(end, 3)) | {"bp": "e"})
    return {"traceEvents": [*spans, *flows], "displayTimeUnit": "ms", "otherData": other or {}}


def check_trace(document: object) -> None:
    """Raise `ValueError`, with a one-sentence message, if `unisono.trace` did not write this document.

    The events may include spans from other programs.
    """
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(document, dict) or not isinstance(events, list):
        raise ValueError("there is no list of traceEvents in it, so it is not a trace; pass a file of unisono.trace")
    other = document.get("otherData", {})
    if not isinstance(other, dict) or not isinstance(other.get("clock_uncertainty_us", 0.0), (int, float)):
        raise ValueError("its otherData is not that of a file of unisono.trace; pass such a file")
    for number, event in enumerate(events):
        if not isinstance(event, dict) or not isinstance(event.get("ph"), str):
            raise ValueError(f"event {number} has no phase; pass a file of unisono.trace")
        args = event.get("args")
        if event["ph"] != "X" or not isinstance(args, dict) or "group" not in args:
            continue
        flow = {"flow": str} if "flow" in args else {}
        for place, fields in ((event, _SPAN), (args, {**_ARGS, **flow})):
            for name, kind in fields.items():
                if not isinstance(place.get(name), kind):
                    raise ValueError(f"event {number} lacks {name}, or has a wrong one; pass a file of unisono.trace")


def _lane(lanes: list[list[float]], event: TraceEvent) -> int:
    """Add the event to the first row in which it does not partly overlap another span, and return the row's number."""
    for number, ends in enumerate(lanes):
        while ends and ends[-1] <= event.start_s:
            ends.pop()
        if not ends or event.end_s <= ends[-1]:
            ends.append(event.end_s)
            return number
    lanes.append([event.end_s])
    return len(lanes) - 1


def _named(what: str, pid: int, tid: int, name: str) -> Json:
    return {"name": what, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}}


def _end_of_flow(ph: str, number: int, at: Json, ts: float) -> Json:
    return {
        "name": "message",
        "cat": "flow",
        "ph": ph,
        "id": number,
        "ts": ts,
        "pid": at["pid"],
        "tid": at["tid"],
        "args": {},
    }
