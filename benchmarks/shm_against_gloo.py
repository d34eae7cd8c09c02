"""Speed of shared memory against gloo.

Results (2 cores, float32, one thread per rank) are in docs/benchmarks.md. To measure on your machine:

    python benchmarks/shm_against_gloo.py [--seconds 4] [--most 100M] [--ranks 2 4 8] [--caches warm cold]

Gloo is torch's own ProcessGroupGloo on the loopback device, with nothing of unisono around it. A ratio is gloo's time
over unisono's, the median of neighbouring samples, with quartiles.
"""

from __future__ import annotations

import argparse

from _bounds import BoundCheck, least_ratio, mean_ratio
from _questions import between, measured, sweep_parser

SMALL, MIDDLE, LARGE = "8,64,512,4K", "64K,256K,1M", "4M,16M,100M"
OTHERS = ("broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


def two_ranks(given: argparse.Namespace, caches: str) -> list[BoundCheck]:
    """Measure ordinary tensors, the barrier, and registered memory beside the roofline."""
    how = {"against": ("gloo",), "cold": caches == "cold"}
    results = measured(given, f"{SMALL},{MIDDLE},{LARGE}", **how)
    what = f"2 ranks, {caches}, ordinary"
    findings = [
        *mean_ratio(f"{what}, 8 B to 4 KiB", between(results, "8", "4K"), "gloo", 15),
        *mean_ratio(f"{what}, 64 KiB to 1 MiB", between(results, "64K", "1M"), "gloo", 10),
        *mean_ratio(f"{what}, 4 to 100 MiB", between(results, "4M", "100M"), "gloo", 4),
    ]
    if caches == "warm":
        # A barrier has no data that could be cold.
        findings += least_ratio("2 ranks, barrier", measured(given, "8", collective="barrier", **how), "gloo", 20)
    results = measured(given, "1M,16M,100M", registered=True, **how | {"against": ("gloo", "roofline")})
    what = f"2 ranks, {caches}, registered"
    for size, bound in (("1M", 20), ("16M", 8), ("100M", 5)):
        findings += least_ratio(f"{what}, {size}iB", between(results, size, size), "gloo", bound)
    for size in ("1M", "16M", "100M"):
        findings += least_ratio(f"{what}, {size}iB", between(results, size, size), "roofline", 0.4)
    return findings


def others(given: argparse.Namespace, caches: str) -> list[BoundCheck]:
    """Measure all other collectives, repeated on the same tensors."""
    findings: list[BoundCheck] = []
    for name in OTHERS:
        results = measured(given, "8,64K,1M,16M", collective=name, against=("gloo",), cold=caches == "cold")
        what = f"2 ranks, {caches}, {name}"
        findings += least_ratio(f"{what}, 8 B", between(results, "8", "8"), "gloo", 15)
        findings += least_ratio(f"{what}, 64 KiB", between(results, "64K", "64K"), "gloo", 5)
        findings += least_ratio(f"{what}, 1 and 16 MiB", between(results, "1M", "16M"), "gloo", 1)
    return findings


def four_ranks(given: argparse.Namespace, caches: str) -> list[BoundCheck]:
    how = {"against": ("gloo",), "cold": caches == "cold", "ranks": 4}
    results = measured(given, f"{SMALL},{MIDDLE},16M,100M", **how)
    registered = measured(given, "16M,100M", registered=True, **how)
    return [
        *least_ratio(f"4 ranks, {caches}, ordinary, up to 1 MiB", between(results, "8", "1M"), "gloo", 5),
        *least_ratio(f"4 ranks, {caches}, ordinary, 16 to 100 MiB", between(results, "16M", "100M"), "gloo", 2),
        *least_ratio(f"4 ranks, {caches}, registered, 16 to 100 MiB", registered, "gloo", 3),
    ]


def eight_ranks(given: argparse.Namespace, caches: str) -> list[BoundCheck]:
    how = {"against": ("gloo",), "cold": caches == "cold", "ranks": 8}
    results = measured(given, f"{SMALL},{MIDDLE},{LARGE}", **how)
    registered = measured(given, "1M,16M,100M", registered=True, **how)
    return [
        *least_ratio(f"8 ranks, {caches}, ordinary, any size", results, "gloo", 1),
        *least_ratio(f"8 ranks, {caches}, registered, 1 to 100 MiB", registered, "gloo", 1),
    ]


def main() -> None:
    options = sweep_parser(__doc__)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="leave out other numbers of ranks")
    given = options.parse_args()
    findings: list[BoundCheck] = []
    for caches in given.caches:
        for ranks, ask in ((2, two_ranks), (2, others), (4, four_ranks), (8, eight_ranks)):
            if ranks in given.ranks:
                findings += ask(given, caches)
    print(*findings, sep="\n")


if __name__ == "__main__":
    main()
