"""What does the MPI backend add to bare mpi4py, on the tensors' own memory? At most 15 % and 25 us, or 10 %?

    python benchmarks/mpi_against_bare.py [--seconds 4] [--most 100M] [--caches warm]

mpirun starts the ranks, and both ways' calls alternate in them. Bare means mpi4py's blocking call on buffers that
were described to MPI beforehand: no check, no time limit. For 8 B the figure is what is left of unisono's time when
1.15 times MPI's is taken off; from 1 MiB it is MPI's time by unisono's. Of messages, half a round trip is timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from _asking import Findings, between, judged, measured, options

import unisono as un
from unisono.bench import Finding, Row, each, parse_sizes
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
        *judged(left, f"{where}, 8 B", [row for row in rows if row.nbytes < 1 << 20], "mpi", 25),
        *judged(each, f"{where}, from 1 MiB", between(rows, "1M", "100M"), "mpi", 0.90),
    ]


def there_and_back(comm: un.Communicator, nbytes: int, seconds: float) -> list[tuple[float, float]]:
    """Microseconds of a message by unisono, and by MPI beside it: medians of neighbouring blocks."""
    from mpi4py import MPI

    world, other = MPI.COMM_WORLD, 1 - comm.rank
    tensor = torch.zeros(nbytes // 4)
    memory = [MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), MPI.FLOAT]

    def own() -> None:
        steps: tuple[Callable[..., Any], ...] = (comm.send, comm.recv)
        for step in steps if comm.rank == 0 else reversed(steps):
            step(tensor, other)

    def bare() -> None:
        steps: tuple[Callable[..., Any], ...] = (world.Send, world.Recv)
        for step in steps if comm.rank == 0 else reversed(steps):
            step(memory, other)

    def block(way: Callable[[], None], count: int) -> float:
        times = []
        for _ in range(count):
            began = time.perf_counter()
            way()
            times.append((time.perf_counter() - began) / 2)
        return 1e6 * median(times)

    found, count = [], max(10, min(200, (16 << 20) // nbytes))
    block(own, 10), block(bare, 10)
    began = time.perf_counter()
    while comm.broadcast_object(len(found) < 8 or time.perf_counter() - began < seconds):
        found.append((block(own, count), block(bare, count)))
    return found


def messages(given: argparse.Namespace) -> Findings:
    """The findings about point-to-point messages of each size."""
    found = []
    for nbytes in parse_sizes(f"{SHORT},{LONG}"):
        if nbytes <= parse_sizes(given.most)[0]:
            pairs, _ = un.launch(there_and_back, 2, "mpi", args=(nbytes, given.seconds))
            what = f"2 ranks, send and recv, {nbytes} B"
            if nbytes < 1 << 20:
                peer = median(bare for _, bare in pairs)
                spread = Spread.of([own - 1.15 * bare for own, bare in pairs])
                found.append(Finding(f"{what}, us beyond 1.15 times mpi's {peer:.1f}", spread, 25, most=True))
            else:
                found.append(Finding(f"{what}, mpi/own", Spread.of([bare / own for own, bare in pairs]), 0.90))
    return found


def main() -> None:
    given = options(__doc__)
    try:
        print(*(f for caches in given.caches for name in COLLECTIVES for f in ask(given, caches, name)), sep="\n")
        print(*messages(given), sep="\n")
    except UnavailableError as error:
        # Every other question can be answered without MPI.
        print(f"not asked: {error}")


if __name__ == "__main__":
    main()
