"""Events of calls on the fast path, made after their end: without a trace the path keeps nothing for them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from unisono.collectives.selection import NATIVE
from unisono.core.call_site import line_of
from unisono.core.tracing import Event, Sink

if TYPE_CHECKING:
    from unisono.core.collective import Collective
    from unisono.core.flight_recorder import Activity, CallRecord, PendingMessage

__all__ = ["record_collective", "record_message"]


def record_collective(
    sink: Sink, activity: Activity, what: Collective, tensors: tuple[Any, Any], op: object, root: int | None
) -> None:
    """Record the collective that the activity is in, as ended now."""
    assert activity.now is not None
    written, read = ([] if t is None else [t] if isinstance(t, torch.Tensor) else list(t) for t in tensors)
    like = next(iter((*written, *read)), None)
    detail: dict[str, object] = {
        "call": activity.now[1],
        "algorithm": NATIVE,
        "site": _site(activity.now),
        "op": str(op) if what.reduces else None,
        "root": root,
        "dtype": None if like is None else str(like.dtype).removeprefix("torch."),
        "shape": None if like is None else tuple(like.shape),
    }
    nbytes = max(sum(t.nbytes for t in written), sum(t.nbytes for t in read))
    _record(sink, activity, [("collective", what.name, detail), ("wait", what.name, {})], nbytes)


def record_message(sink: Sink, activity: Activity, message: PendingMessage, tag: int, nbytes: int) -> None:
    """Record the message that the activity is in, as ended now."""
    kind, peer, _, number = message
    group = activity.group
    sends = kind == "send"
    ends = f"{group.rank}>{peer}" if sends else f"{peer}>{group.rank}"
    detail = {"peer": peer, "tag": tag, "flow": f"{group.name} {ends} tag {tag} #{number}"}
    name = f"{kind} {'to' if sends else 'from'} {peer}"
    _record(sink, activity, [(kind, name, detail), ("wait", kind, {})], nbytes)


def _record(sink: Sink, activity: Activity, spans: list[tuple[str, str, dict[str, object]]], nbytes: int) -> None:
    """Record several views of one call."""
    end, group = time.perf_counter(), activity.group
    start = end - (time.monotonic() - activity.since)
    for kind, name, detail in spans:
        sink(Event(kind, name, group.name, group.rank, start, end, nbytes, detail, group.members[group.rank]))


def _site(noted: CallRecord) -> str | None:
    return line_of(*noted[3]) if isinstance(noted[3], tuple) else noted[3]
