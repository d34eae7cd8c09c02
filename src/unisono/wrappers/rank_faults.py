"""Faults of whole ranks: death, freezes, and slow links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["RankFaults"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFaults:
    """Setting for `Faulty`: ranks that are killed, freeze or have slow links.

    Args:
        kill_at: Number of the `post` call at which the rank is killed: with SIGKILL, or `KilledError` if ranks are
            threads. Each group counts its calls from 1. None for never.
        freeze_at: Number of the `post` call at which the rank freezes, although it still answers the control plane.
            Each group counts its calls from 1, and the rank freezes only once, in the first group that reaches this
            number. None for never.
        freeze_s: Duration of the freeze in seconds. If None, the rank freezes until the group has failed or is closed.
        slow_bytes_per_s: Bandwidth of the link to each rank, in bytes per second; unlimited if None.
        ranks: The affected ranks, by their numbers in the job's initial group; None for all ranks.

    Raises:
        ValueError: A duration is negative, a post number is below 1, or a bandwidth is not positive.
        TypeError: An argument is not a number, or `ranks` is not a sequence of ranks.

    Example:
        >>> def program(comm):
        ...     comm.barrier()
        >>> faults = {"on_ranks": un.testing.RankFaults(kill_at=1, ranks=[1])}
        >>> ends = un.simulate(program, 3, faults=faults, on_failure="continue").results
        >>> [type(end).__name__ for end in ends]
        ['PeerLostError', 'KilledError', 'PeerLostError']
    """

    kill_at: int | None = None
    freeze_at: int | None = None
    freeze_s: float | None = None
    slow_bytes_per_s: float | None = None
    ranks: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name in ("freeze_s", "slow_bytes_per_s"):
            if not isinstance(getattr(self, name), int | float | None):
                raise TypeError(f"{name} must be a number, not {getattr(self, name)!r}")
        if not (self.freeze_s or 0.0) >= 0:
            raise ValueError(f"freeze_s must not be negative, not {self.freeze_s!r}")
        for name in ("kill_at", "freeze_at"):
            at = getattr(self, name)
            if at is not None and not (isinstance(at, int) and at >= 1):
                raise ValueError(f"{name} must be at least 1 and a whole number, not {at!r}")
        if self.slow_bytes_per_s is not None and not self.slow_bytes_per_s > 0:
            raise ValueError(f"slow_bytes_per_s must be positive, not {self.slow_bytes_per_s!r}")
        ranks = self.ranks
        if ranks is not None and (isinstance(ranks, int) or not all(isinstance(rank, int) for rank in ranks)):
            raise TypeError(f"ranks must be a sequence of ranks such as [1], not {ranks!r}")
