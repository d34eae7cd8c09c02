"""Records a transport's collectives and messages as events."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from unisono.core.call import Call, Fingerprint
from unisono.core.flight_recorder import PendingMessage, site_text
from unisono.core.group import Group
from unisono.core.tracing import SINK, ObservedWork, Sink, emit, flow_of, observed_now, span
from unisono.core.transport import Transport
from unisono.core.types import Message, PointToPoint, Send, Work
from unisono.core.work import ChainedWork
from unisono.wrappers.base import Wrapper

__all__ = ["Traced", "observed", "traced", "waits_of"]


class Traced(Wrapper):
    """Reports each message and collective to `sink` when it completes. Forwards all calls, even native collectives.

    Args:
        inner: The transport to record.
        sink: Function called with each event, in the thread that completes the event.
        called_s: Time at which the program made the call, if the wrapper is for a single call.
        posted: Messages of the call, with sequence numbers that count from the group's creation, if the wrapper is for
            a single call.

    Example:
        >>> events = []
        >>> def program(comm):
        ...     comm.all_reduce(torch.ones(8), algorithm="ring")
        >>> _ = un.launch(program, 2, "thread", wrap=lambda t: Traced(t, events.append))
        >>> sum(e.nbytes for e in events if e.kind == "send")
        64
    """

    def __init__(
        self, inner: Transport, sink: Sink, called_s: float | None = None, posted: Sequence[PendingMessage] = ()
    ) -> None:
        super().__init__(inner)
        self.native: frozenset[str] = inner.native
        self._sink = sink
        self._called_s = called_s
        self._posted = posted
        self._sent = Counter[tuple[str, int, int]]()
        self._call = 0

    def wrap_child(self, inner: Transport) -> Traced:
        return Traced(inner, self._sink)

    def compare(self, call: Call, deadline: float) -> None:
        start = time.perf_counter()
        self._call = call.fingerprint.call
        self._sent.clear()
        self.inner.compare(call, deadline)
        self._report("begin", call.fingerprint.operation, start, 0, _detail(call.fingerprint))

    def run(self, call: Call, over: PointToPoint | None = None) -> Work:
        start = self._called_s or time.perf_counter()
        nbytes = max(sum(t.nbytes for t in call.inputs), sum(t.nbytes for t in call.outputs))
        shown = "collective", call.fingerprint.operation, start, nbytes, _detail(call.fingerprint)
        return ChainedWork(super().run(call, over), lambda: self._report(*shown))

    def post(self, batch: Sequence[Message]) -> Work:
        start = time.perf_counter()
        details = [self._message(place, m) for place, m in enumerate(batch)]
        return ChainedWork(self.inner.post(batch), lambda: self._messages(batch, details, start))

    def _message(self, place: int, message: Message) -> dict[str, Any]:
        """Return a message's peer, tag and identifier. Sender and receiver compute the identifier independently."""
        peer = message.peer
        tag = message.tag
        kind = "send" if isinstance(message, Send) else "recv"
        if self._posted:
            number = f"{self._posted[place][3]}"
        else:
            self._sent[kind, peer, tag] += 1
            number = f"{self._call}.{self._sent[kind, peer, tag]}"
        return {"peer": peer, "tag": tag, "flow": flow_of(self.group, kind, peer, tag, number)}

    def _messages(self, batch: Sequence[Message], details: Sequence[dict[str, Any]], start: float) -> None:
        for message, detail in zip(batch, details, strict=True):
            kind, arrow = ("send", "to") if isinstance(message, Send) else ("recv", "from")
            self._report(kind, f"{kind} {arrow} {message.peer}", start, message.tensor.nbytes, detail)

    def _report(self, kind: str, name: str, start: float, nbytes: int, detail: dict[str, Any]) -> None:
        emit(self._sink, kind, name, self.group, start, nbytes, detail)


def _detail(fingerprint: Fingerprint) -> dict[str, Any]:
    return {
        "call": fingerprint.call,
        "algorithm": fingerprint.algorithm,
        "site": site_text(fingerprint.site),
        "op": fingerprint.op,
        "root": fingerprint.root,
        "dtype": fingerprint.dtype,
        "shape": fingerprint.shape,
    }


def traced(transport: Transport, posted: Sequence[PendingMessage] = ()) -> Transport:
    """Return the transport for a call, wrapped in `Traced` if a recording is open in this context."""
    sink = SINK.get()
    return transport if sink is None else Traced(transport, sink, time.perf_counter(), posted)


_UNOBSERVED = nullcontext()


def observed(
    transport: Transport, call: Call, *, starts: bool = False
) -> tuple[Transport, AbstractContextManager[None]]:
    """Return the transport for a collective, and the context manager in which the program waits for the collective.

    The transport and the context manager add events to the recording that is open in this context, if any, and to
    torch's profiler if it is active.

    Args:
        transport: Transport of the communicator.
        call: The collective.
        starts: Whether the program only starts the collective and waits for it later.
    """
    if not observed_now():
        return transport, _UNOBSERVED
    fingerprint = call.fingerprint
    size = "" if fingerprint.shape is None else f"{fingerprint.dtype}{list(fingerprint.shape)}"
    nbytes = max((tensor.nbytes for tensor in (*call.inputs, *call.outputs)), default=0)
    return traced(transport), span("wait", fingerprint.operation, transport.group, nbytes, size, starts=starts)


def waits_of(work: Work, name: str, group: Group) -> Work:
    """Return a `Work` whose waits are recorded, if a recording or a profiler is active.

    Args:
        work: The work.
        name: Name of the work's operation.
        group: Group of the call.
    """
    return ObservedWork(work, name, group) if observed_now() else work
