"""What does the MPI backend add to bare mpi4py, on the tensors' own memory? At most 15 % and 15 us, or 5 %?

    python benchmarks/mpi_against_bare.py [--seconds 4] [--most 100M] [--caches warm]

mpirun starts the ranks, and both ways' calls alternate in them. Bare means mpi4py's blocking call on buffers that
were described to MPI beforehand: no check, no time limit. For 8 B the figure is what is left of unisono's time when
1.15 times MPI's is taken off; from 1 MiB it is MPI's time by unisono's.
"""

from __future__ import annotations

import argparse

from _asking import Findings, between, judged, measured, options

from unisono.bench import Finding, Row, each
from unisono.bench.row import Spread
from unisono.errors import UnavailableError

COLLECTIVES = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
SHORT, LONG = "8", "1M,16M,100M"


def left(what: str, rows: list[Row], peer: str, most_us: float) -> Finding:
    """Microseconds that unisono adds to 1.15 times the peer's, at the first of the sizes."""
    row = rows[0]
    allowed = 1.15 * row.against[peer].time_us
    time = row.time
    found = Spread(time.low - allowed, time.median - allowed, time.high - allowed)
    return Finding(f"{what}, us beyond 1.15 times {peer}'s {row.against[peer].time_us:.1f}", found, most_us, most=True)


def ask(given: argparse.Namespace, caches: str, collective: str) -> Findings:
    long = LONG if collective == "all_reduce" else LONG.split(",", maxsplit=1)[0]
    sizes = f"{SHORT},{long}"
    rows = measured(given, sizes, backend="mpi", against=("mpi",), collective=collective, cold=caches == "cold")
    where = f"2 ranks, {caches}, {collective}"
    return [
        *judged(left, f"{where}, 8 B", [row for row in rows if row.nbytes < 1 << 20], "mpi", 15),
        *judged(each, f"{where}, from 1 MiB", between(rows, "1M", "100M"), "mpi", 1 / 1.05),
    ]


def main() -> None:
    given = options(__doc__)
    try:
        print(*(f for caches in given.caches for name in COLLECTIVES for f in ask(given, caches, name)), sep="\n")
    except UnavailableError as error:
        # Every other question can be answered without MPI.
        print(f"not asked: {error}")


if __name__ == "__main__":
    main()
