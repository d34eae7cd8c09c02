"""Results as JSON, with a description of the machine, and as plots."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

import unisono as un
from unisono.host.distribution import required
from unisono.host.processors import model
from unisono.tools.bench.result import Result
from unisono.tools.bench.settings import Settings
from unisono.tools.bench.workload import cache_bytes

__all__ = ["as_json", "check_plot", "machine", "plot"]


def machine() -> dict[str, Any]:
    """Describe this machine and its software versions."""
    return {
        "unisono": un.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": model(),
        "processors": os.cpu_count(),
        "cache_bytes": cache_bytes(),
    }


def as_json(settings: Settings, results: list[Result]) -> dict[str, Any]:
    """Return a dict with `machine`, `settings` and `results`, as JSON-serializable values."""
    return {"machine": machine(), "settings": settings.plain(), "results": [result.plain() for result in results]}


def check_plot() -> Any:
    """Return `matplotlib.figure`; raise `UnavailableError` if plots cannot be drawn."""
    return required("matplotlib.figure", "a plot needs matplotlib", "plot")


def plot(results: list[Result], path: Path) -> None:
    """Plot results to a file, in the format of its suffix, such as .png, .svg or .pdf.

    Raises:
        UnavailableError: matplotlib is not installed.
        ValueError: matplotlib does not support the format.
        OSError: The file cannot be written.
    """
    figure = check_plot().Figure(figsize=(11, 4.5), layout="constrained")
    sizes = [result.nbytes for result in results]
    peers = list(results[0].against)
    bandwidth, ratio = figure.subplots(1, 2)
    bandwidth.plot(sizes, [result.busbw_gb_s for result in results], marker="o", label="unisono")
    for name in peers:
        # Unisono and its peers move the same number of bytes, so their bandwidths differ only because their times do.
        theirs = [result.busbw_gb_s * result.time_us / result.against[name].time_us for result in results]
        bandwidth.plot(sizes, theirs, marker="o", label=name)
        spreads = [result.against[name].ratio for result in results]
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
    first = results[0]
    figure.suptitle(f"{first.collective} of {first.dtype}, {first.ranks} ranks")
    figure.savefig(path)
