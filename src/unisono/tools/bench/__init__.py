"""Benchmark for collectives in the style of nccl-tests, which also measures other implementations in the same run.

results = run(Settings(sizes=parse_sizes("8:16M:*8"), against=("gloo",)), shown=True)

`interleave` times any other code in the same way: it alternates between functions, and ratios compare adjacent samples.
"""

from unisono.tools.bench.peers import PEERS, Peer
from unisono.tools.bench.ranks import on_ranks, run
from unisono.tools.bench.report import as_json, check_plot, machine, plot
from unisono.tools.bench.result import (
    Against,
    Result,
    heading,
    line,
    summary,
)
from unisono.tools.bench.settings import Settings, parse_sizes, shown_size
from unisono.tools.bench.timings import Sample, Spread, Timings, clock, interleave, timed
from unisono.tools.bench.traffic import MemoryTraffic, counted
from unisono.tools.bench.workload import COLLECTIVES, Slot, Workload, bus_factor

__all__ = [
    "COLLECTIVES",
    "PEERS",
    "Against",
    "MemoryTraffic",
    "Peer",
    "Result",
    "Sample",
    "Settings",
    "Slot",
    "Spread",
    "Timings",
    "Workload",
    "as_json",
    "bus_factor",
    "check_plot",
    "clock",
    "counted",
    "heading",
    "interleave",
    "line",
    "machine",
    "on_ranks",
    "parse_sizes",
    "plot",
    "run",
    "shown_size",
    "summary",
    "timed",
]
