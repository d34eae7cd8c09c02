"""Reports from a training loop: log messages from selected ranks, and the throughput of all ranks."""

from __future__ import annotations

import logging
import operator
import time
from collections import deque
from collections.abc import Collection, MutableMapping
from typing import Any, NamedTuple

from unisono.communicator import Communicator, engine_of

__all__ = ["Rate", "Throughput", "rank_logger"]


class Rate(NamedTuple):
    """Sample counts and rate over all ranks. Every rank gets the same values.

    Attributes:
        samples_per_s: `window_samples` divided by `window_s`; nan before the first step.
        window_samples: Number of samples on all ranks in the window's steps.
        window_s: Time that the window's steps took on the slowest rank, in seconds.
        samples: Number of samples on all ranks since the start.

    Example:
        >>> meter = un.utils.Throughput()
        >>> meter.step(4)
        >>> rate: Rate = meter.read()
        >>> rate.window_samples
        4
    """

    samples_per_s: float
    window_samples: int
    window_s: float
    samples: int


class Throughput:
    """Measures samples per second over the most recent steps. Ranks may have different numbers of samples.

    Args:
        comm: Communicator of the ranks; None for a single process.
        window: Number of most recent steps that the rate covers.

    Raises:
        ValueError: `window` is less than 1.

    Example:
        >>> def program(comm):
        ...     meter = un.utils.Throughput(comm)
        ...     for batch in ([0, 1, 2], [3, 4]) if comm.rank == 0 else ([5],):
        ...         meter.step(len(batch))
        ...     return meter.read().samples
        >>> un.launch(program, 2, "thread")
        [6, 6]
    """

    def __init__(self, comm: Communicator | None = None, window: int = 100) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1 step, not {window}")
        self._comm = comm
        self._samples = 0
        self._steps: deque[tuple[float, int]] = deque(maxlen=window + 1)
        self.restart()

    def restart(self) -> None:
        """Begin a new window now, for example after an evaluation that should not count. The total is not reset.

        Example:
            >>> meter = un.utils.Throughput()
            >>> meter.step(4)
            >>> meter.restart()
            >>> meter.read().window_samples, meter.read().samples
            (0, 4)
        """
        self._steps.clear()
        self._steps.append((time.perf_counter(), 0))

    def step(self, samples: int) -> None:
        """Count the samples of a training step that has just ended. Not collective.

        Args:
            samples: This rank's number of samples, 0 or more.

        Raises:
            ValueError: `samples` is negative.
        """
        count = operator.index(samples)
        if count < 0:
            raise ValueError(f"samples must not be negative, as {count} is")
        self._samples += count
        self._steps.append((time.perf_counter(), count))

    def read(self) -> Rate:
        """Return the counts and the rate of all ranks. Collective.

        Returns:
            The counts and the rate. Counts are exact integers.

        Cost: one exchange of about 50 bytes.

        Example:
            >>> meter = un.utils.Throughput()
            >>> meter.step(32)
            >>> rate = meter.read()
            >>> rate.samples, rate.samples_per_s == 32 / rate.window_s
            (32, True)
        """
        steps = list(self._steps)
        # The first entry only marks the start of the window.
        mine = sum(count for _, count in steps[1:]), steps[-1][0] - steps[0][0], self._samples
        everyone = (
            [mine]
            if self._comm is None
            else self._comm.all_gather_object(engine_of(self._comm).measured("throughput", lambda: mine))
        )
        counts, seconds, totals = zip(*everyone, strict=True)
        window_s = max(seconds)
        return Rate(sum(counts) / window_s if window_s else float("nan"), sum(counts), window_s, sum(totals))


def rank_logger(
    logger: logging.Logger | str, comm: Communicator, ranks: Collection[int] | None = None
) -> logging.LoggerAdapter[logging.Logger]:
    """Return a logger adapter that logs only on selected ranks, and prefixes messages with the rank.

    The logger itself is not changed, so ranks that are threads can share it. Records have the attributes `rank`, `size`
    and `step`, for formatters such as `"%(rank)s %(step)s %(message)s"`. To set `step`, pass `extra={"step": step}` to
    a logging call; the default is None.

    Args:
        logger: A logger, or a logger's name.
        comm: Communicator of the ranks.
        ranks: The ranks that log; None for all. With a single rank, messages get no prefix; to log without a prefix on
            all ranks, pass `[comm.rank]`.

    Raises:
        ValueError: One of `ranks` is not a rank of `comm`.

    Example:
        >>> def program(comm):
        ...     everywhere = un.utils.rank_logger("training", comm)
        ...     once = un.utils.rank_logger("training", comm, ranks=[0])
        ...     return everywhere.process("began", {})[0], once.isEnabledFor(logging.WARNING)
        >>> import logging
        >>> un.launch(program, 2, "thread")
        [('[rank 0 of 2] began', True), ('[rank 1 of 2] began', False)]
    """
    for rank in ranks or ():
        if rank not in range(comm.size):
            raise ValueError(f"{rank!r} is not a rank: these are 0 to {comm.size - 1}")
    known = logging.getLogger(logger) if isinstance(logger, str) else logger
    return _RankAdapter(known, comm.rank, comm.size, ranks)


class _RankAdapter(logging.LoggerAdapter[logging.Logger]):
    """Logger adapter of one rank."""

    def __init__(self, logger: logging.Logger, rank: int, size: int, ranks: Collection[int] | None) -> None:
        super().__init__(logger, {"rank": rank, "size": size})
        self._logs = ranks is None or rank in ranks
        self._prefix = "" if ranks is not None and len(ranks) == 1 else f"[rank {rank} of {size}] "

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802
        return self._logs and super().isEnabledFor(level)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"{self._prefix}{msg}", {
            **kwargs,
            "extra": {"step": None, **(kwargs.get("extra") or {}), **(self.extra or {})},
        }
