"""Speed of unisono's ring algorithm on backend gloo, compared with gloo's own all_reduce.

Results (2 ranks, 2 cores, float32, one thread per rank) are in docs/benchmarks.md. To measure on your machine:

    python benchmarks/ring_against_native.py [--ranks 2] [--algorithm ring] [--seconds 4] [--most 100M] [--caches warm]
"""

from __future__ import annotations

from _bounds import least_ratio
from _questions import between, measured, sweep_parser

# Maximum ratio of the schedule's time to the native call's.
BOUNDS = {"1M": 1.1, "16M": 1.1, "100M": 1.3}


def main() -> None:
    options = sweep_parser(__doc__)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--algorithm", default="ring")
    given = options.parse_args()
    for caches in given.caches:
        how = {"backend": "gloo", "algorithm": given.algorithm, "against": ("native",), "cold": caches == "cold"}
        results = measured(given, ",".join(BOUNDS), ranks=given.ranks, **how)
        for size, most in BOUNDS.items():
            what = f"{given.ranks} ranks, {caches}, {given.algorithm}"
            print(*least_ratio(what, between(results, size, size), "native", 1 / most), sep="\n", flush=True)


if __name__ == "__main__":
    main()
