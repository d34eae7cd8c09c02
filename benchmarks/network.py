"""Speed of backend tcp against torch's gloo, on the loopback device.

Results (2 cores, float32, one thread per rank) are in docs/benchmarks.md. To measure on your machine:

    python benchmarks/network.py [--seconds 2] [--most 100M] [--ranks 2 4] [--caches warm]

Gloo is torch's own ProcessGroupGloo, with nothing of unisono around it; tcp is a communicator as `un.init("tcp")` makes
it, which compares the calls of all ranks. Calls of a sample follow each other without a barrier. A ratio is gloo's time
over that of tcp, the median of neighbouring samples, with quartiles.
"""

from __future__ import annotations

import argparse

from _questions import between, measured, sweep_parser

from unisono.tools.bench import Finding, least_ratio

OTHERS = ("broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


def all_reduce(given: argparse.Namespace, ranks: int, caches: str) -> list[Finding]:
    """Measure all_reduce from 8 B to 100 MiB."""
    sizes = "8,1K,16K,64K,1M,16M,100M"
    results = measured(given, sizes, backend="tcp", ranks=ranks, against=("gloo",), cold=caches == "cold")
    what = f"{ranks} ranks, {caches}, all_reduce"
    return [
        *least_ratio(f"{what}, up to 64 KiB", between(results, "8", "64K"), "gloo", 2.5),
        *least_ratio(f"{what}, 1 MiB", between(results, "1M", "1M"), "gloo", 1.25),
        *least_ratio(f"{what}, 16 and 100 MiB", between(results, "16M", "100M"), "gloo", 0.8),
    ]


def others(given: argparse.Namespace, ranks: int, caches: str) -> list[Finding]:
    """Measure the other collectives, with short and with long messages."""
    findings: list[Finding] = []
    for name in OTHERS:
        sizes = "8" if name == "barrier" else "8,1M"
        how = {"backend": "tcp", "ranks": ranks, "against": ("gloo",), "cold": caches == "cold"}
        results = measured(given, sizes, collective=name, **how)
        what = f"{ranks} ranks, {caches}, {name}"
        findings += least_ratio(f"{what}, 8 B", between(results, "1", "8"), "gloo", 2)
        findings += least_ratio(f"{what}, 1 MiB", between(results, "1M", "1M"), "gloo", 1)
    return findings


def main() -> None:
    options = sweep_parser(__doc__)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    given = options.parse_args()
    findings: list[Finding] = []
    for caches in given.caches:
        for ranks in given.ranks:
            findings += all_reduce(given, ranks, caches)
            findings += others(given, ranks, caches)
    print(*findings, sep="\n")


if __name__ == "__main__":
    main()
