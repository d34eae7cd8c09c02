"""Counters and histograms of calls, bytes and waits, as Prometheus text and as scalars for dashboards."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import accumulate

from unisono.core.tracing import TraceEvent, recording

__all__ = ["Metrics"]

_BOUNDS_S = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)
_HELP = {
    "unisono_calls_total": ("counter", "Collectives and messages of this rank."),
    "unisono_bytes_total": ("counter", "Bytes of their tensors."),
    "unisono_call_seconds": ("histogram", "Time from the call to its end."),
    "unisono_wait_seconds": ("histogram", "Time that the program spent in the call or its wait."),
}


class _Totals:
    """Totals for one operation."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.counts = [0] * (len(_BOUNDS_S) + 1)
        self.seconds = 0.0

    def add(self, event: TraceEvent) -> None:
        seconds = event.end_s - event.start_s
        self.nbytes += event.nbytes
        self.counts[bisect_left(_BOUNDS_S, seconds)] += 1
        self.seconds += seconds

    def histogram(self) -> Iterator[tuple[str, int]]:
        """Return each histogram bucket's upper bound, and the number of values up to that bound."""
        return zip([*map(str, _BOUNDS_S), "+Inf"], accumulate(self.counts), strict=True)


class Metrics:
    """Totals of this rank's calls, bytes and waits, by operation.

    Example:
        >>> metrics = un.Metrics()
        >>> with un.init() as comm, metrics.recording():
        ...     comm.all_reduce(torch.ones(4))
        >>> print(metrics.prometheus().splitlines()[2])
        unisono_calls_total{operation="all_reduce",rank="0"} 1
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[tuple[str, int], _Totals] = defaultdict(_Totals)
        self._waits: dict[tuple[str, int], _Totals] = defaultdict(_Totals)

    def recording(self) -> AbstractContextManager[None]:
        """Return a context manager that counts this thread's calls; it can be entered repeatedly.

        As with `unisono.trace`, calls in the returned context don't use the fast path.
        """
        return recording(self._add)

    def _add(self, event: TraceEvent) -> None:
        places = {"wait": self._waits, "collective": self._calls, "send": self._calls, "recv": self._calls}
        place = places.get(event.kind)
        if place is not None:
            key = event.kind if event.kind in ("send", "recv") else event.name.removeprefix("wait for ")
            with self._lock:
                place[key, event.world_rank].add(event)

    def prometheus(self) -> str:
        """Return all totals in Prometheus' text format, to write to a file or to serve over HTTP."""
        lines = list[str]()
        with self._lock:
            calls = sorted(self._calls.items())
            waits = sorted(self._waits.items())
            for name, (kind, text) in _HELP.items():
                lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
                for (operation, rank), totals in waits if name == "unisono_wait_seconds" else calls:
                    labels = f'operation="{operation}",rank="{rank}"'
                    count = sum(totals.counts)
                    if kind == "counter":
                        lines.append(f"{name}{{{labels}}} {count if 'calls' in name else totals.nbytes}")
                        continue
                    lines += [f'{name}_bucket{{{labels},le="{le}"}} {number}' for le, number in totals.histogram()]
                    lines += [f"{name}_sum{{{labels}}} {totals.seconds!r}", f"{name}_count{{{labels}}} {count}"]
        return "\n".join(lines) + "\n"

    def scalars(self) -> dict[str, float]:
        """Return the totals by name, for a dashboard: `unisono/all_reduce/calls`, `.../bytes` and `.../seconds`.

        `unisono/all_reduce/wait_seconds` is the time that the program spent in `all_reduce` and, for asynchronous
        calls, in `wait`. The middle part of a metric's name is the communicator's method. Point-to-point messages count
        as `send` and `recv`, including messages inside a collective; the time spent waiting for them is listed under
        the method that was called, such as `isend`. Methods that were not called are left out. If several ranks share
        the object, their values are summed.

        Example:
            >>> metrics = un.Metrics()
            >>> with un.init() as comm, metrics.recording():
            ...     comm.broadcast(torch.ones(4), 0)
            >>> for name, value in metrics.scalars().items():
            ...     print(name, value if name.endswith(("calls", "bytes")) else "s")
            unisono/broadcast/calls 1.0
            unisono/broadcast/bytes 16.0
            unisono/broadcast/seconds s
            unisono/broadcast/wait_seconds s
        """
        found = defaultdict[str, float](float)
        with self._lock:
            for (operation, _), totals in sorted(self._calls.items()):
                found[f"unisono/{operation}/calls"] += sum(totals.counts)
                found[f"unisono/{operation}/bytes"] += totals.nbytes
                found[f"unisono/{operation}/seconds"] += totals.seconds
            for (operation, _), totals in sorted(self._waits.items()):
                found[f"unisono/{operation}/wait_seconds"] += totals.seconds
        return dict(found)
