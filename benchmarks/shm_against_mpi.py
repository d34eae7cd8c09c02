"""Speed of shared memory in Python, compared with Open MPI's Allreduce through mpi4py.

Results (2 ranks, 2 cores, float32, one thread per rank) are in docs/benchmarks.md. To measure on your machine:

    python benchmarks/shm_against_mpi.py [--seconds 4] [--most 100M] [--caches warm cold]

mpirun starts the ranks, and both libraries' calls alternate in them. A ratio is MPI's time over unisono's, the median
of neighbouring samples, with quartiles.
"""

from __future__ import annotations

import argparse

from _bounds import BoundCheck, least_ratio
from _questions import between, measured, sweep_parser

from unisono.errors import UnavailableError


def ask(given: argparse.Namespace, caches: str) -> list[BoundCheck]:
    how = {"against": ("mpi",), "cold": caches == "cold"}
    results = measured(given, "8,4K,64K,256K,1M,16M,100M", **how)
    registered = measured(given, "1M,16M,100M", registered=True, **how)
    # In pure Python, eight times MPI's time is allowed for tiny messages.
    return [
        *least_ratio(f"2 ranks, {caches}, ordinary, 8 B", between(results, "8", "8"), "mpi", 1 / 8),
        *least_ratio(f"2 ranks, {caches}, ordinary, from 64 KiB", between(results, "64K", "100M"), "mpi", 1),
        *least_ratio(f"2 ranks, {caches}, registered, from 1 MiB", registered, "mpi", 1.8),
    ]


def main() -> None:
    given = sweep_parser(__doc__).parse_args()
    try:
        print(*(finding for caches in given.caches for finding in ask(given, caches)), sep="\n")
    except UnavailableError as error:
        # All other benchmarks work without MPI.
        print(f"not asked: {error}")


if __name__ == "__main__":
    main()
