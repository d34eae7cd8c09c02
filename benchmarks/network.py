"""Speed of backend tcp against torch's gloo, and against Open MPI over TCP, on the loopback device.

Results (2 cores, float32, one thread per rank) are in docs/benchmarks.md. To measure on your machine:

    python benchmarks/network.py [--seconds 2] [--most 100M] [--ranks 2 4] [--caches warm]

Gloo is torch's own ProcessGroupGloo, with nothing of unisono around it; tcp is a communicator as `un.init("tcp")` makes
it, which compares the calls of all ranks. Calls of a sample follow each other without a barrier. For messages, half a
round trip between two ranks is timed. Open MPI is measured through mpi4py, in ranks that mpirun starts as with
`--mca pml ob1 --mca btl tcp,self`, and only if it is installed. Calls of tcp and of the other library alternate in the
same ranks. A ratio is the other's time over that of tcp, the median of neighbouring samples, with quartiles.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import product
from pathlib import Path

import torch
from _bounds import BoundCheck, least_ratio
from _questions import between, measured, sweep_parser

import unisono as un
from unisono.core.types import ReduceOp
from unisono.errors import UnavailableError
from unisono.host.mpi_library import imported, name_of
from unisono.tools.bench import Sample, Slot, Timings, Workload, clock, interleave, on_ranks, parse_sizes, shown_size
from unisono.tools.bench.peers.gloo import Gloo
from unisono.tools.bench.workload import SlotPool
from unisono.tools.bench.workload import given as pattern_of

OTHERS = ("broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
# Minimum ratio of gloo's time to that of tcp, by the bytes of a message.
MESSAGES = {8: 2, 1 << 20: 1}
# Options of Open MPI: by default it uses shared memory, and no loopback address.
OPEN_MPI = {"pml": "ob1", "btl": "tcp,self", "btl_tcp_if_include": "127.0.0.0/8"}
# Maximum ratio of the time of tcp to Open MPI's.
MOST_OF_MPI = 1.3

Transfer = Callable[[torch.Tensor, int], object]


def all_reduce(given: argparse.Namespace, ranks: int, caches: str) -> list[BoundCheck]:
    """Measure all_reduce from 8 B to 100 MiB."""
    sizes = "8,1K,16K,64K,1M,16M,100M"
    results = measured(given, sizes, backend="tcp", ranks=ranks, against=("gloo",), cold=caches == "cold")
    what = f"{ranks} ranks, {caches}, all_reduce"
    return [
        *least_ratio(f"{what}, up to 64 KiB", between(results, "8", "64K"), "gloo", 2.5),
        *least_ratio(f"{what}, 1 MiB", between(results, "1M", "1M"), "gloo", 1.25),
        *least_ratio(f"{what}, 16 and 100 MiB", between(results, "16M", "100M"), "gloo", 0.8),
    ]


def others(given: argparse.Namespace, ranks: int, caches: str) -> list[BoundCheck]:
    """Measure the other collectives, with short and with long messages."""
    findings: list[BoundCheck] = []
    for name in OTHERS:
        sizes = "8" if name == "barrier" else "8,1M"
        how = {"backend": "tcp", "ranks": ranks, "against": ("gloo",), "cold": caches == "cold"}
        results = measured(given, sizes, collective=name, **how)
        what = f"{ranks} ranks, {caches}, {name}"
        # 8 B are rounded up to a part for each rank; a barrier has none.
        short = [result for result in results if result.nbytes <= 64]
        findings += least_ratio(f"{what}, short", short, "gloo", 2)
        findings += least_ratio(f"{what}, 1 MiB", between(results, "1M", "1M"), "gloo", 1)
    return findings


def there_and_back(comm: un.Communicator, nbytes: int, cold: bool, seconds: float, folder: Path) -> Timings:
    """Time half a round trip between two ranks by tcp and by gloo, and verify each message."""
    other = 1 - comm.rank
    # As in an all_gather, each rank receives the other's source into the other's part of its target.
    workload = Workload.of_bytes("all_gather", 2, 2 * nbytes, torch.float32, ReduceOp.SUM)
    expected = pattern_of(other, 2, workload.dtype, workload.op)
    pool = SlotPool(workload, torch.empty, cold=cold)
    pool.fill(comm.rank)

    def received(slot: Slot) -> torch.Tensor:
        return slot.target.view(2, -1)[other]

    def sample(name: str, send: Transfer, recv: Transfer) -> Sample:
        def trip(sent: torch.Tensor, target: torch.Tensor) -> None:
            if comm.rank == 0:
                send(sent, other)
                recv(target, other)
            else:
                recv(target, other)
                send(sent, other)

        def take() -> float:
            slots = pool.next()
            found = clock([partial(trip, slot.source, received(slot)) for slot in slots], comm) / 2
            if any(expected.wrong(received(slot)) for slot in slots):
                raise SystemExit(f"a message of {name} is wrong")
            for slot in slots:
                workload.fill(slot, comm.rank)
            return found

        return take

    with closing(Gloo(comm, folder)) as gloo:
        samples = {
            "own": sample("tcp", comm.send, comm.recv),
            "gloo": sample(
                "gloo",
                lambda tensor, rank: gloo.group.send([tensor], rank, 0).wait(),
                lambda tensor, rank: gloo.group.recv([tensor], rank, 0).wait(),
            ),
        }
        return interleave(samples, comm, seconds=seconds).slowest(comm)


def messages(given: argparse.Namespace, caches: str) -> list[BoundCheck]:
    """Measure short and long messages between two ranks."""
    findings = []
    for nbytes, bound in MESSAGES.items():
        if nbytes <= parse_sizes(given.most)[0]:
            timings = on_ranks(there_and_back, 2, "tcp", (nbytes, caches == "cold", given.seconds))[0]
            times = ", ".join(f"{name} {timings.of(name).median * 1e6:.1f} us" for name in ("own", "gloo"))
            what = f"2 ranks, {caches}, send and recv, {shown_size(nbytes)}, {times}, gloo/own"
            findings.append(BoundCheck(what, timings.ratio("gloo", "own"), bound))
    return findings


def open_mpi(given: argparse.Namespace) -> list[BoundCheck]:
    """Measure all_reduce beside Open MPI.

    Raises:
        UnavailableError: Open MPI, or mpi4py, is not installed.
    """
    library = name_of(imported())
    if not library.startswith("Open MPI"):
        raise UnavailableError(f"mpi4py uses {library}")
    # mpirun takes the options from here.
    os.environ |= {f"OMPI_MCA_{name}": value for name, value in OPEN_MPI.items()}
    findings: list[BoundCheck] = []
    for caches, ranks in product(given.caches, given.ranks):
        how = {"backend": "tcp", "ranks": ranks, "against": ("mpi",), "cold": caches == "cold"}
        results = between(measured(given, "8,1M,16M", **how), "1M", "16M")
        findings += least_ratio(f"{ranks} ranks, {caches}, all_reduce, from 1 MiB", results, "mpi", 1 / MOST_OF_MPI)
    print(f"# mpi is {library}, {', '.join(f'{name} {value}' for name, value in OPEN_MPI.items())}", flush=True)
    return findings


def main() -> None:
    options = sweep_parser(__doc__)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    given = options.parse_args()
    findings: list[BoundCheck] = []
    for caches, ranks in product(given.caches, given.ranks):
        findings += all_reduce(given, ranks, caches)
        findings += others(given, ranks, caches)
        if ranks == 2:
            findings += messages(given, caches)
    try:
        findings += open_mpi(given)
    except UnavailableError as error:
        print(f"Open MPI was not measured: {error}")
    print(*findings, sep="\n")


if __name__ == "__main__":
    main()
