"""Overhead of the MPI backend over bare mpi4py calls on tensors.

    python benchmarks/mpi_against_bare.py [--seconds 4] [--most 100M] [--caches warm]

mpirun starts the ranks, and both ways' calls alternate in them. Bare means mpi4py's blocking call on buffers that
were described to MPI beforehand: no check, no time limit. For 8 B the figure is unisono's time minus 1.15 times
MPI's; from 1 MiB it is MPI's time over unisono's. The bounds are 25 us and 0.9. For messages, half a round trip is
timed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from _bounds import BoundCheck, least_ratio
from _questions import between, measured, sweep_parser

import unisono as un
from unisono.errors import UnavailableError
from unisono.tools.bench import COLLECTIVES, Spread, Timings, interleave, on_ranks, parse_sizes, timed

SHORT, LONG = "8", "1M,16M,100M"
MOST_US, LEAST_RATIO = 25, 0.90


def beyond(what: str, own: Spread, mpi_us: float) -> BoundCheck:
    """Return the microseconds that unisono adds to 1.15 times MPI's time."""
    allowed = 1.15 * mpi_us
    left = Spread(own.low - allowed, own.median - allowed, own.high - allowed)
    return BoundCheck(f"{what}, us beyond 1.15 times mpi's {mpi_us:.1f}", left, MOST_US, most=True)


def ask(given: argparse.Namespace, caches: str, collective: str) -> list[BoundCheck]:
    sizes = f"{SHORT},{LONG if collective == 'all_reduce' else '1M'}"
    results = measured(given, sizes, backend="mpi", against=("mpi",), collective=collective, cold=caches == "cold")
    where = f"2 ranks, {caches}, {collective}"
    short = [beyond(f"{where}, 8 B", each.time, each.against["mpi"].time_us) for each in between(results, "8", "8")]
    return [*short, *least_ratio(f"{where}, from 1 MiB", between(results, "1M", "100M"), "mpi", LEAST_RATIO)]


def there_and_back(comm: un.Communicator, nbytes: int, seconds: float, folder: Path) -> Timings:
    """Time a message and its reply by unisono and by MPI, side by side."""
    from mpi4py import MPI

    world, other = MPI.COMM_WORLD, 1 - comm.rank
    tensor = torch.zeros(nbytes // 4)
    memory = [MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), MPI.FLOAT]

    def own() -> None:
        for step in (comm.send, comm.recv) if comm.rank == 0 else (comm.recv, comm.send):
            step(tensor, other)

    def bare() -> None:
        for step in (world.Send, world.Recv) if comm.rank == 0 else (world.Recv, world.Send):
            step(memory, other)

    count = max(10, min(200, (16 << 20) // nbytes))
    samples = {"own": timed(own, comm, count=count), "mpi": timed(bare, comm, count=count)}
    return interleave(samples, comm, seconds=seconds).slowest(comm)


def messages(given: argparse.Namespace) -> list[BoundCheck]:
    """Return the findings about point-to-point messages of each size."""
    found = []
    for nbytes in parse_sizes(f"{SHORT},{LONG}"):
        if nbytes <= parse_sizes(given.most)[0]:
            timings = on_ranks(there_and_back, 2, "mpi", (nbytes, given.seconds))[0]
            what = f"2 ranks, send and recv, {nbytes} B"
            if nbytes < 1 << 20:
                found.append(beyond(what, timings.of("own") * 5e5, timings.of("mpi").median * 5e5))
            else:
                found.append(BoundCheck(f"{what}, mpi/own", timings.ratio("mpi", "own"), LEAST_RATIO))
    return found


def main() -> None:
    given = sweep_parser(__doc__).parse_args()
    try:
        for caches in given.caches:
            for collective in COLLECTIVES:
                if collective != "barrier":
                    print(*ask(given, caches, collective), sep="\n", flush=True)
        print(*messages(given), sep="\n")
    except UnavailableError as error:
        # All other benchmarks work without MPI.
        print(f"not asked: {error}")


if __name__ == "__main__":
    main()
