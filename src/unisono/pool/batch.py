"""Batches of queued calls, their division into chunks, and the results of a `map`."""

from __future__ import annotations

import math
import queue
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from unisono.core import clock

__all__ = ["LONGEST_S", "Part", "Range", "TaskBatch", "results"]

_SHORTEST_S = 1e-3
LONGEST_S = 50e-3
"""Minimum and maximum time that a chunk should take. Sending a chunk and its results takes about 0.1 ms."""

Range = tuple[int, int]
Part = tuple[int, Sequence[Any], BaseException | None]
"""Arguments of a batch's `deliver`."""


class TaskBatch:
    """Queued calls of one function.

    Args:
        name: Name of the function, for error messages.
        size: Number of calls.
        pack: Function that encodes a range of calls as bytes.
        deliver: Function called with a start index, the results from that index on, and the error of the first failed
            call, or None if no call failed.
        begin: Function called before the first call is sent; if `begin` returns False, no call is sent.
        chunksize: Calls per chunk; if None, adapted to the number of remaining calls and the time that each call takes.
    """

    def __init__(
        self,
        name: str,
        size: int,
        pack: Callable[[int, int], bytes],
        deliver: Callable[[int, Sequence[Any], BaseException | None], None],
        begin: Callable[[], bool] = lambda: True,
        chunksize: int | None = None,
    ) -> None:
        self.name = name
        self.pack = pack
        self.deliver = deliver
        self._begin: Callable[[], bool] | None = begin
        self._chunksize = chunksize
        self.seconds: float | None = None
        self.todo: deque[Range] = deque([(0, size)])
        self.deaths: Counter[int] = Counter()

    def wanted(self) -> bool:
        """Return whether any calls are waiting to be sent."""
        begin = self._begin
        self._begin = None
        if begin is not None and not begin():
            self.todo.clear()
        return bool(self.todo)

    @property
    def short(self) -> bool:
        """Return whether a chunk is known to take only a short time."""
        return self.seconds is not None and self.seconds * (self._chunksize or 1) <= LONGEST_S

    def take(self, workers: int) -> Range:
        """Return the next chunk: half of a worker's share of the remaining calls, within the chunk time limits.

        Source: Polychronopoulos and Kuck, *Guided self-scheduling* (1987).
        """
        start, stop = self.todo.popleft()
        left = stop - start
        size = float(self._chunksize or 1)
        if self._chunksize is None and self.seconds is not None:
            seconds = max(self.seconds, 1e-9)
            size = max(min(left / (2 * workers), LONGEST_S / seconds), _SHORTEST_S / seconds)
        middle = start + min(left, math.ceil(size))
        if middle < stop:
            self.todo.appendleft((middle, stop))
        return start, middle

    def drop(self) -> None:
        """Drop the calls that are waiting to be sent, and any calls that are put back later."""
        self.todo = deque(maxlen=0)


def results(
    arrived: queue.SimpleQueue[Part], size: int, until: float | None, unordered: bool, drop: Callable[[], None]
) -> Iterator[Any]:
    """Yield the results of a `map` in order, or as they arrive if `unordered`."""
    parts: dict[int, Part] = {}
    done = 0
    try:
        while done < size:
            while not (parts if unordered else done in parts):
                try:
                    part = arrived.get(timeout=None if until is None else max(0.0, until - clock.now()))
                except queue.Empty:
                    if until is not None and clock.now() < until:
                        # Keep waiting: while a debugger stops the ranks, our clock also stops, but the timeout of `get`
                        # does not.
                        continue
                    raise TimeoutError(f"{done} of {size} results arrived in time") from None
                parts[part[0]] = part
            _, values, error = parts.pop(next(iter(parts)) if unordered else done)
            done += len(values)
            yield from values
            if error is not None:
                raise error
    finally:
        drop()
