"""Two ways side by side in one run: alternating order, paired ratios, the median and its spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import unisono as un

__all__ = ["Ratio", "side_by_side"]


@dataclass(frozen=True)
class Ratio:
    """How long the first way took in units of the second.

    Attributes:
        first_s, second_s: Median seconds of each.
        median, low, high: Of the ratios of neighbouring runs; low and high are the quartiles.
        runs: How many pairs.
    """

    first_s: float
    second_s: float
    median: float
    low: float
    high: float
    runs: int

    def __str__(self) -> str:
        return (
            f"{self.first_s * 1e3:9.3f} ms / {self.second_s * 1e3:9.3f} ms = {self.median:5.2f} "
            f"({self.low:.2f} to {self.high:.2f}, {self.runs} pairs)"
        )


def side_by_side(
    comm: un.Communicator,
    first: Callable[[], object],
    second: Callable[[], object],
    after: Callable[[], object],
    *,
    seconds: float,
    least: int = 9,
) -> Ratio:
    """Time two collective calls in the order A B B A, again and again; the same number of times on all ranks.

    Args:
        comm: The ranks; each pair of runs starts after a barrier.
        first, second: What is compared.
        after: Run outside the clock after each: verifies, and prepares the next.
        seconds: About how long, all in all.
        least: Pairs at least.
    """
    for way in (first, second):
        way()
        after()
    started = time.perf_counter()
    for way in (first, second):
        way()
        after()
    pairs = comm.broadcast_object(max(least, int(seconds / max(time.perf_counter() - started, 1e-6))))
    pairs = min(pairs, 400)
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            comm.barrier()
            began = time.perf_counter()
            (first, second)[which]()
            times[which].append(time.perf_counter() - began)
            after()
    ratios = sorted(a / b for a, b in zip(*times, strict=True))
    quarter = len(ratios) // 4
    return Ratio(
        statistics.median(times[0]),
        statistics.median(times[1]),
        statistics.median(ratios),
        ratios[quarter],
        ratios[-quarter - 1],
        pairs,
    )
