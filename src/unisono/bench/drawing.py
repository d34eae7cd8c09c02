"""The rows as a picture: bandwidth by size, and the ratios to the peers with their quartiles."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from unisono.bench.row import Row
from unisono.errors import UnavailableError

__all__ = ["check_plot", "plot"]


def check_plot() -> None:
    """Raise `UnavailableError` if no picture can be made."""
    if find_spec("matplotlib") is None:
        raise UnavailableError("a plot needs matplotlib: pip install 'unisono[plot]'")


def plot(rows: list[Row], path: Path) -> None:
    """Draw to a file, whose ending says the format: .png, .svg, .pdf.

    Raises:
        UnavailableError: matplotlib is not installed.
        ValueError: matplotlib knows no such format.
        OSError: The file cannot be written.
    """
    check_plot()
    from matplotlib.figure import Figure

    sizes = [row.nbytes for row in rows]
    peers = list(rows[0].against)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    bandwidth, ratio = figure.subplots(1, 2)
    bandwidth.plot(sizes, [row.busbw_gb_s for row in rows], marker="o", label="unisono")
    for name in peers:
        # The bus carries as much for everybody: only the time differs.
        theirs = [row.busbw_gb_s * row.time_us / row.against[name].time_us for row in rows]
        bandwidth.plot(sizes, theirs, marker="o", label=name)
        spreads = [row.against[name].ratio for row in rows]
        (drawn,) = ratio.plot(sizes, [s.median for s in spreads], marker="o", label=f"{name} / unisono")
        ratio.fill_between(
            sizes, [s.low for s in spreads], [s.high for s in spreads], alpha=0.2, color=drawn.get_color()
        )
    bandwidth.set(xscale="log", yscale="log", xlabel="bytes", ylabel="bus bandwidth, GB/s")
    ratio.set(xscale="log", yscale="log", xlabel="bytes", ylabel="time in units of unisono's")
    ratio.axhline(1, color="grey", linewidth=0.8)
    for axes in (bandwidth, ratio) if peers else (bandwidth,):
        axes.legend()
        axes.grid(alpha=0.3)
    first = rows[0]
    figure.suptitle(f"{first.collective} of {first.dtype}, {first.ranks} ranks")
    figure.savefig(path)
