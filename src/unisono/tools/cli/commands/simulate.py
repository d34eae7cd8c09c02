"""Simulate collective algorithms on a model of a network, for any number of ranks. Nothing is sent.

The command prints a table of the simulated time until the last rank finishes, by number of ranks and bytes, and marks
the best time in each row.

  unisono simulate all_reduce ring recursive_doubling --ranks 8,64,1024 --bytes 8,64K,1M,1G
  unisono simulate all_reduce ring binomial --ranks 1024 --bytes 1M --levels host:8:1us:10GB/s:1GB/s --alpha 10us
  unisono simulate broadcast binomial --ranks 16 --bytes 1M --goal schedule.goal --trace trace.json
"""

from __future__ import annotations

import argparse
import json
import re
from itertools import groupby
from pathlib import Path

from unisono.collectives.algorithms import ALGORITHMS, COLLECTIVES, find
from unisono.lab.simulator import (
    Level,
    Network,
    ScalingPoint,
    chrome_trace,
    goal,
    plot_scaling,
    scaling,
    simulate,
)
from unisono.tools.cli import refusing

__all__ = ["add_arguments", "run"]

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_BYTES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the collective, the algorithms, the network and the outputs."""
    add = parser.add_argument
    add("collective", choices=COLLECTIVES, metavar="collective", help=f"one of {', '.join(COLLECTIVES)}")
    add("algorithms", nargs="*", help="algorithms (all of the collective by default)")
    add("--ranks", default="8,64,512", help="numbers of ranks, as a list or a range such as 8:1024:*2 (%(default)s)")
    add("--bytes", default="8,64K,1M", help="message sizes, as a list or a range such as 8:1G:*8 (%(default)s)")
    add("--alpha", default="10us", help="latency of a message, with s, ms, us or ns (%(default)s)")
    add("--bandwidth", default="1GB/s", help="bytes per second of a rank's port, with K, M, G or T (%(default)s)")
    add("--gamma", default="0ns", help="time to reduce one received byte (%(default)s)")
    add("--overhead", help="processor time for each message, which makes the model LogGP")
    add("--gap", default="0us", help="least time between two messages of a rank in LogGP (%(default)s)")
    add(
        "--levels",
        default="",
        help="units from the innermost out, such as host:8:1us:10GB/s:1GB/s,rack:64:5us:1GB/s: name, ranks, latency "
        "and bandwidth inside, bandwidth of the link to the outside",
    )
    add("--jitter", default="0us", help="mean of a random delay of each message (%(default)s)")
    add("--seed", type=int, default=0, help="seed of the jitter (%(default)s)")
    add("--json", action="store_true", help="print the network and the times as JSON instead of the table")
    add("--plot", type=Path, metavar="FILE", help="draw scaling curves to this file (.png, .svg, .pdf)")
    add("--goal", type=Path, metavar="FILE", help="write one algorithm's schedule in GOAL, for LogGOPSim")
    add("--trace", type=Path, metavar="FILE", help="write one algorithm's simulated messages as a Chrome trace")


def run(given: argparse.Namespace) -> int:
    """Simulate the algorithms, and print or write the requested outputs."""
    from unisono.tools.bench.report import check_plot
    from unisono.tools.bench.settings import parse_sizes

    if given.plot:
        check_plot()
    with refusing(ValueError, OSError):
        network = _network(given)
        sizes = parse_sizes(given.ranks)
        lengths = parse_sizes(given.bytes)
        names = given.algorithms or ALGORITHMS[given.collective].names()
        if given.goal or given.trace:
            _export(given, network, names, sizes, lengths)
            return 0
        points = scaling(given.collective, names, sizes, lengths, network)
        if given.plot:
            plot_scaling(points, given.plot)
    print(_as_json(given, network, points) if given.json else _table(points))
    return 0


def _export(
    given: argparse.Namespace, network: Network, names: list[str], sizes: tuple[int, ...], lengths: tuple[int, ...]
) -> None:
    if not len(names) == len(sizes) == len(lengths) == 1:
        raise ValueError("--goal and --trace write one run; pass one algorithm, one number of ranks and one size")
    algorithm = find(given.collective, names[0])
    if given.goal:
        given.goal.write_text(goal(given.collective, algorithm, sizes[0], lengths[0], gamma=network.gamma) + "\n")
    if given.trace:
        found = simulate(given.collective, algorithm, sizes[0], lengths[0], network=network, record=True)
        given.trace.write_text(chrome_trace(found))


def _network(given: argparse.Namespace) -> Network:
    return Network(
        alpha=_time(given.alpha),
        bandwidth=_rate(given.bandwidth),
        gamma=_time(given.gamma),
        overhead=None if given.overhead is None else _time(given.overhead),
        gap=_time(given.gap),
        levels=tuple(_level(text) for text in given.levels.split(",") if text),
        jitter=_time(given.jitter),
        seed=given.seed,
    )


def _level(text: str) -> Level:
    parts = text.split(":")
    if len(parts) not in (4, 5) or not parts[1].isdecimal():
        raise ValueError(f"{text!r} is not a level; pass name:ranks:alpha:bandwidth:uplink, as host:8:1us:10GB/s:1GB/s")
    uplink = _rate(parts[4]) if len(parts) == 5 else None
    return Level(parts[0], int(parts[1]), _time(parts[2]), _rate(parts[3]), uplink)


def _time(text: str) -> float:
    found = re.fullmatch(r"([\d.]+(?:e-?\d+)?) ?(s|ms|us|ns)", text.strip())
    if not found:
        raise ValueError(f"{text!r} is not a time; pass a number with s, ms, us or ns, such as 10us")
    return float(found[1]) * _SECONDS[found[2]]


def _rate(text: str) -> float:
    found = re.fullmatch(r"([\d.]+(?:e\d+)?) ?([KMGT]?)(?:B/s|B)?", text.strip())
    if not found:
        raise ValueError(f"{text!r} is not a bandwidth; pass bytes per second with K, M, G or T, such as 10GB/s")
    return float(found[1]) * _BYTES[found[2]]


def _table(points: list[ScalingPoint]) -> str:
    from unisono.tools.bench.settings import shown_size

    names = list(dict.fromkeys(point.algorithm for point in points))
    widths = [max(len(name), 12) for name in names]
    lines = ["simulated microseconds; * marks the best of each row", ""]
    lines.append(f"{'bytes':>8} {'ranks':>8}" + "".join(f"  {n:>{w}} " for n, w in zip(names, widths, strict=True)))
    for (length, size), row in groupby(points, key=lambda point: (point.nbytes, point.size)):
        times = [point.seconds for point in row]
        best = min((seconds for seconds in times if seconds is not None), default=None)
        cells = [
            f"  {'-' if seconds is None else f'{seconds * 1e6:.1f}':>{width}}{'*' if seconds == best else ' '}"
            for seconds, width in zip(times, widths, strict=True)
        ]
        lines.append(f"{shown_size(length):>8} {size:>8}" + "".join(cells).rstrip())
    return "\n".join(lines)


def _as_json(given: argparse.Namespace, network: Network, points: list[ScalingPoint]) -> str:
    described = {
        "collective": given.collective,
        "alpha_s": network.alpha,
        "bandwidth": network.bandwidth,
        "gamma_s": network.gamma,
        "overhead_s": network.overhead,
        "levels": given.levels,
    }
    return json.dumps({"simulated": True, **described, "points": [point._asdict() for point in points]}, indent=1)
