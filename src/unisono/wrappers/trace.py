"""Recording of every call and message as an event, in a file that trace viewers open."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.core.combined_work import ChainedWork
from unisono.core.fingerprint import Fingerprint
from unisono.core.transport import Transport
from unisono.core.types import CollectiveCall, Message, Send, Work
from unisono.wrappers.base import Wrapper

__all__ = ["SINK", "Event", "Sink", "Traced", "sink_here", "trace", "traced"]


@dataclass(frozen=True, slots=True)
class Event:
    """One recorded action of a rank.

    Attributes:
        kind: "begin" (a collective is called), "collective" (native), "send" or "recv".
        name: Name of the operation; for messages, sender and receiver.
        group, rank: Group, and rank in it.
        start_s, end_s: By `time.perf_counter`; equal where only the moment is known.
        nbytes: Bytes moved.
        detail: Further information.
    """

    kind: str
    name: str
    group: str
    rank: int
    start_s: float
    end_s: float
    nbytes: int
    detail: dict[str, Any]


Sink = Callable[[Event], None]


class Traced(Wrapper):
    """Reports each message and collective to `sink` as it ends; forwards everything, native collectives too.

    Args:
        inner: The transport to record.
        sink: Called with each event, in the thread that completes it.

    Example:
        >>> events = []
        >>> def program(comm):
        ...     comm.all_reduce(torch.ones(8), algorithm="ring")
        >>> _ = un.launch(program, 2, "thread", wrap=lambda t: Traced(t, events.append))
        >>> sum(e.nbytes for e in events if e.kind == "send")
        64
    """

    def __init__(self, inner: Transport, sink: Sink) -> None:
        super().__init__(inner)
        self.native, self._sink = inner.native, sink

    def wrap_child(self, inner: Transport) -> Traced:
        return Traced(inner, self._sink)

    def begin(self, fingerprint: Fingerprint, timeout_s: float) -> None:
        start = time.perf_counter()
        self.inner.begin(fingerprint, timeout_s)
        detail = {"call": fingerprint.call, "algorithm": fingerprint.algorithm, "site": fingerprint.site}
        self._tell("begin", fingerprint.operation, start, time.perf_counter(), 0, detail)

    def post(self, batch: Sequence[Message]) -> Work:
        start = time.perf_counter()
        return ChainedWork(self.inner.post(batch), lambda: self._messages(batch, start))

    def collective(self, call: CollectiveCall) -> Work:
        start = time.perf_counter()
        nbytes = max(sum(t.nbytes for t in call.inputs), sum(t.nbytes for t in call.outputs))
        detail = {"op": call.op, "root": call.root}
        return ChainedWork(
            self.inner.collective(call),
            lambda: self._tell("collective", call.name, start, time.perf_counter(), nbytes, detail),
        )

    def _messages(self, batch: Sequence[Message], start: float) -> None:
        for message in batch:
            kind, arrow = ("send", "to") if isinstance(message, Send) else ("recv", "from")
            name = f"{kind} {arrow} {message.peer}"
            detail = {"peer": message.peer, "tag": message.tag}
            self._tell(kind, name, start, time.perf_counter(), message.tensor.nbytes, detail)

    def _tell(self, kind: str, name: str, start: float, end: float, nbytes: int, detail: dict[str, Any]) -> None:
        self._sink(Event(kind, name, self.group.name, self.rank, start, end, nbytes, detail))


SINK: ContextVar[Sink | None] = ContextVar("unisono trace", default=None)

sink_here = SINK.get
"""The sink of the `trace` that is open in this context, or None. Read at each call, so it runs no Python frame."""


def traced(transport: Transport) -> Transport:
    """Return the transport, traced if a `trace` is open in this context."""
    sink = SINK.get()
    return transport if sink is None else Traced(transport, sink)


@contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[list[Event]]:
    """Record the calls and messages of communicators inside the `with`, and write them to `path` at its end.

    The file is JSON in the trace-event format that Perfetto and chrome://tracing open. Calls of other threads
    are not recorded.

    Args:
        path: File to write, replaced if it exists; each rank needs one of its own.

    Yields:
        The list of events, which grows as they end.

    Raises:
        OSError: The file cannot be written, found at the end of the `with`.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.json"
        >>> with un.init() as comm, un.trace(path) as events:
        ...     comm.all_reduce(torch.ones(4))
        >>> events[0].name, json.loads(path.read_text())["traceEvents"][0]["name"]
        ('all_reduce', 'all_reduce')
    """
    events: list[Event] = []
    token = SINK.set(events.append)
    try:
        yield events
    finally:
        SINK.reset(token)
        Path(path).write_text(json.dumps({"traceEvents": [_viewed(event) for event in events]}))


def _viewed(event: Event) -> dict[str, Any]:
    return {
        "name": event.name,
        "cat": event.kind,
        "ph": "X",
        "ts": event.start_s * 1e6,
        "dur": (event.end_s - event.start_s) * 1e6,
        "pid": event.rank,
        "tid": event.group,
        "args": {"nbytes": event.nbytes, **event.detail},
    }
