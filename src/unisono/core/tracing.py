"""Trace events, the sink that is open in a context, and spans that torch's profiler also shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import profiler

from unisono.core import clock
from unisono.core.call import NATIVE
from unisono.core.collective import Collective
from unisono.core.flight_recorder import Activity, PendingMessage, site_text
from unisono.core.group import Group
from unisono.core.types import Timeout, Work
from unisono.core.work import ChainedWork

__all__ = [
    "SINK",
    "ObservedWork",
    "Sink",
    "TraceEvent",
    "emit",
    "flow_of",
    "observed_now",
    "profiler",
    "record_collective",
    "record_message",
    "recording",
    "span",
]


@dataclass(slots=True)
class TraceEvent:
    """A recorded action by a rank.

    Attributes:
        kind: "begin" (the check before a collective), "collective", "send", "recv", "bucket", "wait" (the time that the
            program spends in a call or in `wait`) or "bucket_wait" (the time that it waits for a bucket).
        name: Name of the operation, or a message's sender and receiver.
        group, rank: Name of the group, and rank in it.
        start_s, end_s: Times from `time.perf_counter`; equal for an instantaneous event.
        nbytes: Number of bytes moved.
        detail: Further information.
        world_rank: Rank in the job's first group.
    """

    kind: str
    name: str
    group: str
    rank: int
    start_s: float
    end_s: float
    nbytes: int
    detail: dict[str, Any]
    world_rank: int = 0


Sink = Callable[[TraceEvent], None]


class _Sinks(tuple[Sink, ...]):
    """Sinks of the open recordings, the innermost first; this object is itself a sink."""

    __slots__ = ()

    def __call__(self, event: TraceEvent) -> None:
        for sink in self:
            sink(event)


SINK: ContextVar[_Sinks | None] = ContextVar("unisono trace", default=None)
"""The sinks that are open in this context, or None.

`SINK.get` is implemented in C, so that a call without a trace creates no Python frame for it. Torch's profiler is
checked separately, by reading the global `profiler._is_profiler_enabled`.
"""


def emit(sink: Sink, kind: str, name: str, group: Group, start_s: float, nbytes: int, detail: dict[str, Any]) -> None:
    """Emit an event of this rank; the event ends now."""
    end_s = time.perf_counter()
    sink(TraceEvent(kind, name, group.name, group.rank, start_s, end_s, nbytes, detail, group.members[group.rank]))


def flow_of(group: Group, kind: str, peer: int, tag: int, number: str) -> str:
    """Return the ID of a message ("send" or "recv" on this rank), the same at both ends."""
    ends = f"{group.rank}>{peer}" if kind == "send" else f"{peer}>{group.rank}"
    return f"{group.name} {ends} tag {tag} #{number}"


def observed_now() -> bool:
    """Return whether calls are recorded: a recording is open in this context, or torch's profiler is active."""
    return SINK.get() is not None or profiler._is_profiler_enabled


@contextmanager
def recording(sink: Sink) -> Iterator[None]:
    """Pass the events of this thread's calls to `sink`, and to the sinks of enclosing recordings.

    A sink that is already open, for example when a library records into its caller's metrics, gets each event only
    once.
    """
    sinks = SINK.get() or _Sinks()
    token = SINK.set(sinks if sink in sinks else _Sinks([sink, *sinks]))
    try:
        yield
    finally:
        SINK.reset(token)


@contextmanager
def span(kind: str, name: str, group: Group, nbytes: int = 0, size: str = "", **detail: Any) -> Iterator[None]:
    """Record the block as an event if a sink is open, and as `unisono::name size` if torch's profiler is active.

    If the block raises, the event is recorded with the error's name.
    """
    sink = SINK.get()
    start = time.perf_counter()
    shown = f"unisono::{name} {size}".rstrip()
    try:
        with profiler.record_function(shown) if profiler._is_profiler_enabled else nullcontext():
            yield
    except BaseException as error:
        detail["error"] = type(error).__name__
        raise
    finally:
        if sink is not None:
            emit(sink, kind, name, group, start, nbytes, detail)


class ObservedWork(ChainedWork):
    """A `Work` whose waits are recorded.

    Args:
        inner: The work.
        name: Name of its operation.
        group: Group of the call.
    """

    def __init__(self, inner: Work, name: str, group: Group) -> None:
        super().__init__(inner)
        self._name = f"wait for {name}"
        self._group = group

    def wait(self, timeout: Timeout | None = None) -> None:
        with span("wait", self._name, self._group):
            super().wait(timeout)


# -- fast-path calls, recorded after they end, so that a call without a trace costs nothing extra -------------------
def record_collective(
    sink: Sink, activity: Activity, what: Collective, tensors: tuple[Any, Any], op: object, root: int | None
) -> None:
    """Record the activity's current collective as ending now."""
    assert activity.now is not None
    written, read = ([] if t is None else [t] if isinstance(t, torch.Tensor) else list(t) for t in tensors)
    like = next(iter((*written, *read)), None)
    detail: dict[str, object] = {
        "call": activity.now[1],
        "algorithm": NATIVE,
        "site": site_text(activity.now[3]),
        "op": str(op) if what.reduces else None,
        "root": root,
        "dtype": None if like is None else str(like.dtype).removeprefix("torch."),
        "shape": None if like is None else tuple(like.shape),
    }
    nbytes = max(sum(t.nbytes for t in written), sum(t.nbytes for t in read))
    _record(sink, activity, [("collective", what.name, detail), ("wait", what.name, {})], nbytes)


def record_message(sink: Sink, activity: Activity, message: PendingMessage, tag: int, nbytes: int) -> None:
    """Record the activity's current message as ending now."""
    kind, peer, _, number = message
    group = activity.group
    detail = {"peer": peer, "tag": tag, "flow": flow_of(group, kind, peer, tag, f"{number}")}
    name = f"{kind} {'to' if kind == 'send' else 'from'} {peer}"
    _record(sink, activity, [(kind, name, detail), ("wait", kind, {})], nbytes)


def _record(sink: Sink, activity: Activity, spans: list[tuple[str, str, dict[str, object]]], nbytes: int) -> None:
    """Record a call as several events."""
    start = time.perf_counter() - (clock.now() - activity.since)
    for kind, name, detail in spans:
        emit(sink, kind, name, activity.group, start, nbytes, detail)
