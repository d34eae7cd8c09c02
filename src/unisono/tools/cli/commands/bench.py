"""Measure collectives on ranks of this host, next to gloo, MPI and plain memory copies.

The table has the columns of nccl-tests. Each peer (another implementation, named in --against)
adds three columns: its time, and the median and quartiles of its time divided by unisono's time
in the adjacent sample.

  unisono bench --sizes 8:128M:*4 --against gloo
  unisono bench -n 4 --backend shm --sizes 1M,16M --registered --plot results.svg
  unisono bench --json > results.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from unisono.tools.cli import refusing

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options; see `unisono.tools.bench.Settings`."""
    # Repeat defaults and names as literals: reading them from `Settings` would import torch, which would make --help
    # slow.
    add = parser.add_argument
    add(
        "--collective",
        default="all_reduce",
        help="collective to measure, such as all_gather; an unknown name lists all (%(default)s)",
    )
    add("--backend", default="auto", help="unisono's backend: shm, gloo, thread; auto is shm where it works")
    add("-n", "--ranks", type=int, default=2, help="number of ranks, one thread each (%(default)s)")
    add(
        "--sizes",
        default="8,4K,64K,1M,16M",
        help="message sizes in bytes: a list such as 8,4K,1M, or a range such as 8:128M:*4 (%(default)s)",
    )
    add("--dtype", default="float32", help="dtype of the elements (%(default)s)")
    add(
        "--op",
        default="sum",
        help="operation of reductions: sum, avg, product, min, max, band, bor, bxor (%(default)s)",
    )
    add("--algorithm", help="native, or an algorithm such as ring (default: unisono's choice)")
    add("--registered", action="store_true", help="allocate unisono's buffers with Communicator.empty")
    add("--cold", action="store_true", help="rotate buffers, so that each call uses memory outside the caches")
    add(
        "--against",
        default="",
        metavar="PEERS",
        help="peers to measure in the same run, separated by commas: gloo, mpi, native, roofline",
    )
    add("--roofline", action="store_true", help="the same as --against roofline: all ranks copy as many bytes")
    add("--seconds", type=float, default=2.0, help="approximate time for each size (%(default)s)")
    add(
        "--json",
        action="store_true",
        help="print settings, machine and results as JSON instead of the table",
    )
    add("--plot", type=Path, metavar="FILE", help="plot bandwidths and ratios to this file (.png, .svg, .pdf)")


def run(given: argparse.Namespace) -> int:
    """Measure, and print the results. Return 1 if any result was wrong."""
    from unisono.tools import bench

    with refusing(ValueError, OSError):
        if given.plot:
            bench.check_plot()
            if given.collective == "barrier":
                raise ValueError("a barrier has no sizes to draw; leave out --plot")
            if not given.plot.parent.is_dir():
                raise ValueError(f"the directory {given.plot.parent} does not exist; create it first")
        peers = [name.strip() for name in given.against.split(",") if name.strip()]
        if given.roofline and "roofline" not in peers:
            peers.append("roofline")
        settings = bench.Settings(
            collective=given.collective,
            backend=given.backend,
            ranks=given.ranks,
            sizes=bench.parse_sizes(given.sizes),
            dtype=given.dtype,
            op=given.op,
            algorithm=given.algorithm,
            registered=given.registered,
            cold=given.cold,
            against=tuple(peers),
            seconds=given.seconds,
        )
    results = bench.run(settings, shown=not given.json)
    print(json.dumps(bench.as_json(settings, results), indent=1) if given.json else bench.summary(results))
    with refusing(ValueError, OSError):
        if given.plot:
            bench.plot(results, given.plot)
    return 1 if any(result.wrong for result in results) else 0
