"""Calls that wait to be sent, and the size of the next chunk of them."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Batch", "Range"]

_SHORTEST_S, _LONGEST_S = 1e-3, 50e-3
"""A chunk should take between these times: to exchange one takes about 0.1 ms."""

Range = tuple[int, int]


class Batch:
    """Calls of one function that are to run.

    Args:
        name: Name of the function, for errors.
        size: Number of calls.
        pack: Returns the bytes of the calls from one index to another.
        deliver: Called with an index, the results of the calls from there on, and the error of the next call, if any.
        begin: Called before the first call is sent; returns whether it is still wanted.
        chunksize: Calls of a chunk; adapted to what remains and to the time that calls take if None.
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
        self.name, self.pack, self.deliver = name, pack, deliver
        self._begin: Callable[[], bool] | None = begin
        self._chunksize = chunksize
        self.seconds: float | None = None
        self.todo: deque[Range] = deque([(0, size)])
        self.deaths: Counter[int] = Counter()

    def wanted(self) -> bool:
        """Return whether calls wait to be sent."""
        begin, self._begin = self._begin, None
        if begin is not None and not begin():
            self.todo.clear()
        return bool(self.todo)

    @property
    def short(self) -> bool:
        """Return whether a chunk is known to be soon over."""
        return self.seconds is not None and self.seconds * (self._chunksize or 1) <= _LONGEST_S

    def take(self, workers: int) -> Range:
        """Return the next chunk: half of a worker's share of what remains, within bounds of time.

        After Polychronopoulos and Kuck, *Guided self-scheduling* (1987).
        """
        start, stop = self.todo.popleft()
        left = stop - start
        size = float(self._chunksize or 1)
        if self._chunksize is None and self.seconds is not None:
            seconds = max(self.seconds, 1e-9)
            size = max(min(left / (2 * workers), _LONGEST_S / seconds), _SHORTEST_S / seconds)
        middle = start + min(left, math.ceil(size))
        if middle < stop:
            self.todo.appendleft((middle, stop))
        return start, middle

    def retry(self, chunk: Range) -> None:
        """Put calls of a lost worker back, one by one: a call that ends its worker harms no other one."""
        self.todo.extendleft((index, index + 1) for index in reversed(range(*chunk)))
