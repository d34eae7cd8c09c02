"""Tables: the columns of nccl-tests, and for each peer its time and how many times as fast unisono was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unisono.core.collective import FAMILIES
from unisono.tools.bench.result import Against, Result
from unisono.tools.bench.settings import Settings

__all__ = ["heading", "line", "markdown", "summary"]

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
    """Return the title and the column names; every line is a comment, as in nccl-tests."""
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
    """Return the line of one result."""
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
    widths = [width for _, _, width in _COLUMNS]
    for peer in result.against.values():
        cells += _peer(peer)
        widths += [width for _, _, width in _PEER_COLUMNS]
    return " " + " ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _peer(peer: Against) -> list[str]:
    ratio = peer.ratio
    return [_figure(peer.time_us), f"{ratio.median:.2f}", f"{ratio.low:.2f}..{ratio.high:.2f}"]


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table as markdown.

    Example:
        >>> print(markdown(("size", "ratio"), [("8 B", "1.02")]))
        | size | ratio |
        |---|---|
        | 8 B | 1.02 |
    """
    shown = [f"| {' | '.join(cells)} |" for cells in (header, *lines)]
    return "\n".join([shown[0], "|" + "---|" * len(header), *shown[1:]])


def _figure(value: float) -> str:
    """Format with at least three significant digits."""
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def summary(results: list[Result]) -> str:
    """Return how many elements of each candidate were wrong."""
    wrong = {"unisono": sum(result.wrong for result in results)}
    for result in results:
        for name, peer in result.against.items():
            wrong[name] = wrong.get(name, 0) + peer.wrong
    counted = ", ".join(f"{count} of {name}" for name, count in wrong.items() if count)
    return f"# wrong elements: {counted or 'none'}"
