"""Builds the replay of a recorded run from a file written by un.trace, which contains messages but no chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from unisono.lab.player.replay import Replay
from unisono.lab.simulator import Message

__all__ = ["replay_trace"]


def replay_trace(document: Mapping[str, Any]) -> Replay:
    """Return the replay of a document written by un.trace. Times are relative to the first message.

    Args:
        document: The file's parsed JSON.

    Raises:
        ValueError: The document has no message whose send and receive were both recorded, or there is too much to show
            on a page.
    """
    try:
        return _replay(document["traceEvents"])
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"this is not a document of un.trace: {type(error).__name__}: {error}") from error


def _replay(events: list[dict[str, Any]]) -> Replay:
    spans = [event for event in events if event["ph"] == "X"]
    sends, receives = (
        {event["args"]["flow"]: event for event in spans if event["cat"] == kind} for kind in ("send", "recv")
    )
    both = sorted((sends[flow]["ts"], flow) for flow in sends.keys() & receives.keys())
    if not both:
        raise ValueError("no message has both its ends here; record all ranks by un.trace(path, comm)")
    calls = {(event["args"]["group"], event["args"]["call"]): event for event in spans if event["cat"] == "collective"}
    numbers = sorted({sends[flow]["pid"] for _, flow in both} | {receives[flow]["pid"] for _, flow in both})
    places = {number: place for place, number in enumerate(numbers)}
    steps = Counter[int]()
    origin = both[0][0]
    messages = []
    for begin, flow in both:
        send = sends[flow]
        receive = receives[flow]
        steps[send["pid"]] += 1
        end = max(begin, receive["ts"] + receive["dur"])
        messages.append(
            Message(
                *(places[send["pid"]], places[receive["pid"]], (), int(send["args"]["nbytes"])),
                *((begin - origin) / 1e6, (end - origin) / 1e6, False, steps[send["pid"]]),
                call=_call(calls, send["args"]["group"], flow),
            )
        )
    count = len({message.call for message in messages if message.call})
    return Replay(
        title="a recorded run",
        about=f"{len(messages)} messages among {len(numbers)} ranks, in {count} calls, as un.trace recorded them.",
        ranks=tuple(f"rank {number}" for number in numbers),
        messages=tuple(messages),
        unit="s",
    )


def _call(calls: Mapping[tuple[str, int], dict[str, Any]], group: str, flow: str) -> str:
    """Describe the collective that a message belongs to; return an empty string if there is none."""
    number = flow.rpartition("#")[2].partition(".")[0]
    event = calls.get((group, int(number))) if number.isdecimal() else None
    if event is None:
        return ""
    detail = event["args"]
    by = f" by {detail['algorithm']}" if detail.get("algorithm") else ""
    return f"{event['name']}{by} #{number} at {detail.get('site')}"
