"""Interleaved timing: candidates alternate within one run, and ratios compare adjacent samples."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from unisono.communicator import Communicator
from unisono.core.garbage import no_collection

__all__ = ["Sample", "Spread", "Timings", "clock", "interleave", "timed"]

Sample = Callable[[], float]
"""Function that takes one sample of a candidate, and returns a figure, usually a time in seconds."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles.

    Example:
        >>> Spread.of([1.0, 2.0, 3.0, 4.0, 5.0])
        Spread(low=2.0, median=3.0, high=4.0)
        >>> f"{Spread.of([1.0, 2.0, 3.0]):.1f}"
        '2.0 (1.5 to 2.5)'
    """

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> Spread:
        """Return the median and quartiles of one or more figures."""
        if len(figures) == 1:
            return cls(figures[0], figures[0], figures[0])
        return cls(*statistics.quantiles(figures, n=4, method="inclusive"))

    def __mul__(self, factor: float) -> Spread:
        return Spread(self.low * factor, self.median * factor, self.high * factor)

    def __format__(self, form: str) -> str:
        return f"{self.median:{form}} ({self.low:{form}} to {self.high:{form}})"


@dataclass(frozen=True)
class Timings:
    """Samples of each candidate, by name, with one sample per round.

    Example:
        >>> timings = Timings({"new": [2.0, 3.0, 2.0], "old": [4.0, 6.0, 6.0]})
        >>> timings.rounds, timings.of("new").median, timings.ratio("old", "new").median
        (3, 2.0, 2.0)
    """

    figures: Mapping[str, Sequence[float]]

    @property
    def rounds(self) -> int:
        """Number of samples of each candidate."""
        return len(next(iter(self.figures.values())))

    def of(self, name: str) -> Spread:
        """Return the spread of one candidate's samples."""
        return Spread.of(self.figures[name])

    def ratio(self, name: str, to: str) -> Spread:
        """Return the spread of the ratios between adjacent samples of two candidates."""
        return Spread.of([a / b for a, b in self._pairs(name, to)])

    def difference(self, name: str, to: str) -> Spread:
        """Return the spread of the differences between adjacent samples of two candidates."""
        return Spread.of([a - b for a, b in self._pairs(name, to)])

    def compared(self, name: str, to: str) -> str:
        """Return a line with both candidates' medians and their ratio.

        Example:
            >>> Timings({"new": [0.002, 0.003], "old": [0.004, 0.006]}).compared("new", "old")
            '    2.500 ms /     5.000 ms =  0.50 (0.50 to 0.50, 2 pairs)'
        """
        ratio = self.ratio(name, to)
        first, second = (f"{self.of(each).median * 1e3:9.3f} ms" for each in (name, to))
        return f"{first} / {second} = {ratio.median:5.2f} ({ratio.low:.2f} to {ratio.high:.2f}, {self.rounds} pairs)"

    def slowest(self, comm: Communicator) -> Timings:
        """Return each sample's maximum over all ranks, because a call ends when the last rank is done. Collective."""
        figures = torch.tensor([list(each) for each in self.figures.values()], dtype=torch.float64)
        comm.all_reduce(figures, "max")
        return Timings(dict(zip(self.figures, figures.tolist(), strict=True)))

    def _pairs(self, name: str, to: str) -> Iterator[tuple[float, float]]:
        return zip(self.figures[name], self.figures[to], strict=True)


def clock(calls: Iterable[Callable[[], object]], comm: Communicator | None = None) -> float:
    """Time consecutive calls, and return the mean seconds per call.

    Args:
        calls: One or more functions to call.
        comm: Communicator whose ranks start the calls together. No rank continues while another rank is still being
            timed.
    """
    listed = list(calls)
    if comm is not None:
        comm.barrier()
    began = time.perf_counter()
    for call in listed:
        call()
    seconds = (time.perf_counter() - began) / len(listed)
    if comm is not None:
        comm.barrier()
    return seconds


def timed(
    call: Callable[[], object],
    comm: Communicator | None = None,
    *,
    count: int = 1,
    before: Callable[[], object] | None = None,
    after: Callable[[], object] | None = None,
) -> Sample:
    """Return a function for `interleave` that times a call.

    Args:
        call: The function to time.
        comm: As for `clock`.
        count: Number of calls per sample. Use several if one call is too short for the clock's resolution.
        before, after: Functions that prepare the call and verify its result, outside the timed region.
    """

    def sample() -> float:
        if before is not None:
            before()
        seconds = clock([call] * count, comm)
        if after is not None:
            after()
        return seconds

    return sample


def interleave(
    samples: Mapping[str, Sample],
    comm: Communicator | None = None,
    *,
    seconds: float = 0.0,
    rounds: int | None = None,
    least: int = 9,
    most: int = 2000,
    warmup: int = 2,
    after_round: Callable[[], object] | None = None,
) -> Timings:
    """Take samples of all candidates in alternating order, such as A B, B A, without garbage collection.

    Args:
        samples: Functions that take a sample, by candidate name.
        comm: Communicator of the participating ranks. All use the same number of rounds, and each returns its own
            timings.
        seconds: Approximate duration; the number of rounds is determined from the last warm-up round.
        rounds: Number of rounds; if given, `seconds`, `least` and `most` are ignored.
        least, most: Bounds on the number of rounds.
        warmup: Number of rounds at the start that are not counted.
        after_round: Function called after each round, outside the timed region, for work that needs all candidates'
            results.

    Example:
        >>> timings = interleave({"sum": timed(lambda: sum(range(9))), "len": timed(lambda: len("nine"))}, rounds=4)
        >>> timings.rounds
        4
    """
    figures: dict[str, list[float]] = {name: [] for name in samples}

    def take(number: int) -> None:
        for name in _order(list(samples), number):
            figures[name].append(samples[name]())
        if after_round is not None:
            after_round()

    gc.collect()
    with no_collection():
        taken = 0.0
        for number in range(warmup):
            began = time.perf_counter()
            take(number)
            taken = time.perf_counter() - began
        if rounds is None:
            rounds = min(max(least, int(seconds / taken) if taken else least), max(least, most))
            rounds = rounds if comm is None else int(comm.broadcast_object(rounds))
        for number in range(rounds):
            take(number)
    return Timings({name: each[warmup:] for name, each in figures.items()})


def _order(names: list[str], number: int) -> list[str]:
    """Return the order of candidates in a round, rotated so that each candidate is sometimes first, sometimes last."""
    turn = number // 2 % len(names)
    turned = names[turn:] + names[:turn]
    return turned[::-1] if number % 2 else turned
