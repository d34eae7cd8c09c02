"""The table: the columns of nccl-tests, and for each peer its time and how many times as fast unisono was."""

from __future__ import annotations

from unisono.bench.problem import REDUCING
from unisono.bench.row import Against, Row
from unisono.bench.settings import Settings

__all__ = ["heading", "line", "summary"]

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
    """What is measured, and the columns' names; every line a comment, as in nccl-tests."""
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


def line(row: Row) -> str:
    """One row."""
    cells = [
        str(row.nbytes),
        str(row.count),
        row.dtype if row.count else "-",
        row.op if row.collective in REDUCING else "-",
        row.algorithm,
        _figure(row.time_us),
        f"{row.algbw_gb_s:.2f}",
        f"{row.busbw_gb_s:.2f}",
        str(row.wrong),
    ]
    widths = [width for _, _, width in _COLUMNS]
    for peer in row.against.values():
        cells += _peer(peer)
        widths += [width for _, _, width in _PEER_COLUMNS]
    return " " + " ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _peer(peer: Against) -> list[str]:
    ratio = peer.ratio
    return [_figure(peer.time_us), f"{ratio.median:.2f}", f"{ratio.low:.2f}..{ratio.high:.2f}"]


def _figure(value: float) -> str:
    """Four digits that count."""
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def summary(rows: list[Row]) -> str:
    """Who was wrong, and how often."""
    wrong = {"unisono": sum(row.wrong for row in rows)}
    for row in rows:
        for name, peer in row.against.items():
            wrong[name] = wrong.get(name, 0) + peer.wrong
    counted = ", ".join(f"{count} of {name}" for name, count in wrong.items() if count)
    return f"# wrong elements: {counted or 'none'}"
