"""Measurements of unisono and its peers on one workload, formatted as tables and compared with bounds.

Tables have the columns of nccl-tests and, for each peer, its time and the ratio of its time to unisono's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from unisono.core.collective import FAMILIES
from unisono.tools.bench.settings import Settings
from unisono.tools.bench.timings import Spread
from unisono.tools.bench.workload import bus_factor

__all__ = [
    "Against",
    "Result",
    "heading",
    "line",
    "summary",
]


@dataclass(frozen=True, slots=True)
class Against:
    """Measurements of a peer (another implementation) in the same run.

    Attributes:
        time_us: Median time of a call in microseconds.
        ratio: Ratio of the peer's time to unisono's time in adjacent samples; above 1 if unisono was faster.
        wrong: Number of wrong elements in the peer's results, over all ranks and calls.
    """

    time_us: float
    ratio: Spread
    wrong: int


@dataclass(frozen=True, slots=True)
class Result:
    """Result for one size of a collective.

    Attributes:
        nbytes: Size in bytes of a rank's whole input or output, whichever is larger.
        count: Number of elements in the whole tensor if the collective is in place, otherwise in one rank's part.
        algorithm: "native", or a schedule's name.
        time: Time of a call in microseconds, on the slowest rank.
        wrong: Number of wrong elements in the results, over all ranks and calls.
        samples: Number of samples of each candidate.
        against: Measurements of each peer, by name.
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
        """Message size divided by time, in GB/s (10^9 bytes)."""
        return self.nbytes / self.time_us / 1e3

    @property
    def busbw_gb_s(self) -> float:
        """Bus bandwidth as in nccl-tests: `algbw_gb_s`, scaled so that different numbers of ranks are comparable."""
        return self.algbw_gb_s * bus_factor(self.collective, self.ranks)

    def plain(self) -> dict[str, Any]:
        """Return all fields and the bandwidths as JSON-serializable values."""
        figures = {"time_us": self.time_us, "algbw_gb_s": self.algbw_gb_s, "busbw_gb_s": self.busbw_gb_s}
        return asdict(self) | figures


_COLUMNS = (
    ("size", "(B)", 11),
    ("count", "(elements)", 11),
    ("type", "", 9),
    ("op", "", 7),
    ("algorithm", "", 18),
    ("time", "(us)", 10),
    ("algbw", "(GB/s)", 7),
    ("busbw", "(GB/s)", 7),
    ("#wrong", "", 6),
)
_PEER_COLUMNS = (("{}", "(us)", 10), ("{}/own", "", 8), ("quartiles", "", 15))


def heading(settings: Settings) -> str:
    """Return the title and the column names; each line is a comment, as in nccl-tests."""
    memory = "registered" if settings.registered else "ordinary"
    caches = "cold" if settings.cold else "warm"
    ranks = f"{settings.ranks} rank" + ("s" if settings.ranks > 1 else "")
    what = f"{settings.collective}, {ranks}, {settings.chosen_backend}, {memory} memory, {caches} caches"
    columns = [
        *_COLUMNS,
        *((top.format(peer), below, width) for peer in settings.against for top, below, width in _PEER_COLUMNS),
    ]
    return "\n".join(
        (
            f"# {what}; medians; ratios of neighbouring samples",
            "#" + " ".join(top.rjust(width) for top, _, width in columns),
            "#" + " ".join(below.rjust(width) for _, below, width in columns).rstrip(),
        )
    )


def line(result: Result) -> str:
    """Return the line for one result."""
    cells = [
        str(result.nbytes),
        str(result.count),
        result.dtype if result.count else "-",
        result.op if FAMILIES[result.collective].reduces else "-",
        result.algorithm,
        _figure(result.time_us),
        f"{result.algbw_gb_s:.2f}",
        f"{result.busbw_gb_s:.2f}",
        str(result.wrong),
    ]
    for peer in result.against.values():
        ratio = peer.ratio
        cells += [_figure(peer.time_us), f"{ratio.median:.2f}", f"{ratio.low:.2f}..{ratio.high:.2f}"]
    widths = [width for _, _, width in (*_COLUMNS, *(_PEER_COLUMNS * len(result.against)))]
    return " " + " ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _figure(value: float) -> str:
    """Format with at least three significant digits."""
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def summary(results: list[Result]) -> str:
    """Return a line that says how many elements of each candidate's results were wrong."""
    wrong = {"unisono": sum(result.wrong for result in results)}
    for result in results:
        for name, peer in result.against.items():
            wrong[name] = wrong.get(name, 0) + peer.wrong
    counted = ", ".join(f"{count} of {name}" for name, count in wrong.items() if count)
    return f"# wrong elements: {counted or 'none'}"
