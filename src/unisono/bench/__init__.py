"""Measures collectives as nccl-tests do, against other ways to do them, side by side in one run.

rows = run(Settings(sizes=parse_sizes("8:16M:*8"), against=("gloo",)), shown=True)
"""

from __future__ import annotations

from unisono.bench.drawing import check_plot, plot
from unisono.bench.peer import Peer
from unisono.bench.peers import PEERS
from unisono.bench.problem import COLLECTIVES, Problem, Slot, bus_factor
from unisono.bench.ranks import on_ranks, run
from unisono.bench.report import machine, write_json
from unisono.bench.row import Against, Row, Spread
from unisono.bench.settings import Settings
from unisono.bench.sizes import parse_sizes, shown_size
from unisono.bench.table import heading, line, summary
from unisono.bench.targets import Finding, each, overall
from unisono.bench.traffic import Traffic, counted

__all__ = [
    "COLLECTIVES",
    "PEERS",
    "Against",
    "Finding",
    "Peer",
    "Problem",
    "Row",
    "Settings",
    "Slot",
    "Spread",
    "Traffic",
    "bus_factor",
    "check_plot",
    "counted",
    "each",
    "heading",
    "line",
    "machine",
    "on_ranks",
    "overall",
    "parse_sizes",
    "plot",
    "run",
    "shown_size",
    "summary",
    "write_json",
]
