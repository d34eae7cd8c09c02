"""Is shared memory as much faster than gloo as it was meant to be?

Answer (2 cores, float32, one thread a rank): see docs/benchmarks.md; run it to see yours:

    python benchmarks/shm_against_gloo.py [--seconds 4] [--most 100M] [--ranks 2 4 8] [--caches warm cold]

Gloo is torch's own ProcessGroupGloo on the loopback device, with nothing of unisono around it. A ratio is gloo's time
by unisono's, the median of neighbouring samples, with quartiles.
"""

from __future__ import annotations

import argparse

from _asking import Findings, between, judged, measured, options

from unisono.bench import each, overall

SMALL, MIDDLE, LARGE = "8,64,512,4K", "64K,256K,1M", "4M,16M,100M"
OTHERS = ("broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


def two_ranks(given: argparse.Namespace, caches: str) -> Findings:
    """Ordinary tensors, the barrier, and registered memory beside the roofline."""
    how = {"against": ("gloo",), "cold": caches == "cold"}
    rows = measured(given, f"{SMALL},{MIDDLE},{LARGE}", **how)
    what = f"2 ranks, {caches}, ordinary"
    findings = [
        *judged(overall, f"{what}, 8 B to 4 KiB", between(rows, "8", "4K"), "gloo", 15),
        *judged(overall, f"{what}, 64 KiB to 1 MiB", between(rows, "64K", "1M"), "gloo", 10),
        *judged(overall, f"{what}, 4 to 100 MiB", between(rows, "4M", "100M"), "gloo", 4),
    ]
    if caches == "warm":
        # A barrier has no memory that could be cold.
        findings += judged(each, "2 ranks, barrier", measured(given, "8", collective="barrier", **how), "gloo", 20)
    rows = measured(given, "1M,16M,100M", registered=True, **how | {"against": ("gloo", "roofline")})
    what = f"2 ranks, {caches}, registered"
    for size, bound in (("1M", 20), ("16M", 8), ("100M", 5)):
        findings += judged(each, f"{what}, {size}iB", between(rows, size, size), "gloo", bound)
    for size in ("1M", "16M", "100M"):
        findings += judged(each, f"{what}, {size}iB", between(rows, size, size), "roofline", 0.4)
    return findings


def others(given: argparse.Namespace, caches: str) -> Findings:
    """All other collectives, made again and again with the same tensors."""
    findings: Findings = []
    for name in OTHERS:
        rows = measured(given, "8,64K,1M,16M", collective=name, against=("gloo",), cold=caches == "cold")
        what = f"2 ranks, {caches}, {name}"
        findings += judged(each, f"{what}, 8 B", between(rows, "8", "8"), "gloo", 15)
        findings += judged(each, f"{what}, 64 KiB", between(rows, "64K", "64K"), "gloo", 5)
        findings += judged(each, f"{what}, 1 and 16 MiB", between(rows, "1M", "16M"), "gloo", 1)
    return findings


def four_ranks(given: argparse.Namespace, caches: str) -> Findings:
    how = {"against": ("gloo",), "cold": caches == "cold", "ranks": 4}
    rows = measured(given, f"{SMALL},{MIDDLE},16M,100M", **how)
    registered = measured(given, "16M,100M", registered=True, **how)
    return [
        *judged(each, f"4 ranks, {caches}, ordinary, up to 1 MiB", between(rows, "8", "1M"), "gloo", 5),
        *judged(each, f"4 ranks, {caches}, ordinary, 16 to 100 MiB", between(rows, "16M", "100M"), "gloo", 2),
        *judged(each, f"4 ranks, {caches}, registered, 16 to 100 MiB", registered, "gloo", 3),
    ]


def eight_ranks(given: argparse.Namespace, caches: str) -> Findings:
    how = {"against": ("gloo",), "cold": caches == "cold", "ranks": 8}
    rows = measured(given, f"{SMALL},{MIDDLE},{LARGE}", **how)
    registered = measured(given, "1M,16M,100M", registered=True, **how)
    return [
        *judged(each, f"8 ranks, {caches}, ordinary, any size", rows, "gloo", 1),
        *judged(each, f"8 ranks, {caches}, registered, 1 to 100 MiB", registered, "gloo", 1),
    ]


def main() -> None:
    given = options(__doc__)
    findings: Findings = []
    for caches in given.caches:
        for ranks, ask in ((2, two_ranks), (2, others), (4, four_ranks), (8, eight_ranks)):
            if ranks in given.ranks:
                findings += ask(given, caches)
    print(*findings, sep="\n")


if __name__ == "__main__":
    main()
