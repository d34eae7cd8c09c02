"""Results of one workload: unisono's figures and its peers'."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from unisono.tools.bench.timings import Spread
from unisono.tools.bench.workload import bus_factor

__all__ = ["Against", "Result"]


@dataclass(frozen=True, slots=True)
class Against:
    """A peer in the same run.

    Attributes:
        time_us: Median time of a call.
        ratio: Its time over unisono's in neighbouring samples: how many times as fast unisono was.
        wrong: Elements of its results, over all ranks and calls, that were wrong.
    """

    time_us: float
    ratio: Spread
    wrong: int


@dataclass(frozen=True, slots=True)
class Result:
    """One size of a collective.

    Attributes:
        nbytes: Bytes of a rank's input or output, whichever is larger, over all parts.
        count: Elements of the whole tensor where the collective is in place, else of one rank's part.
        algorithm: "native", or a schedule's name.
        time: Microseconds for a call, on the rank that took longest.
        wrong: Elements of the results, over all ranks and calls, that were wrong.
        samples: Number of samples of each candidate.
        against: Figures by peer.
    """

    collective: str
    ranks: int
    nbytes: int
    count: int
    dtype: str
    op: str
    algorithm: str
    time: Spread
    wrong: int
    samples: int
    against: dict[str, Against] = field(default_factory=dict)

    @property
    def time_us(self) -> float:
        """Median time in microseconds."""
        return self.time.median

    @property
    def algbw_gb_s(self) -> float:
        """Bytes of the message over time, in GB/s (10^9 bytes)."""
        return self.nbytes / self.time_us / 1e3

    @property
    def busbw_gb_s(self) -> float:
        """`algbw_gb_s` times the factor by which nccl-tests make it comparable between numbers of ranks."""
        return self.algbw_gb_s * bus_factor(self.collective, self.ranks)

    def plain(self) -> dict[str, Any]:
        """Return fields and bandwidths as JSON-serializable values."""
        figures = {"time_us": self.time_us, "algbw_gb_s": self.algbw_gb_s, "busbw_gb_s": self.busbw_gb_s}
        return asdict(self) | figures
