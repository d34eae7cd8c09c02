"""Predicted versus measured run times of algorithms: over gloo, shm and MPI, and between throttled hosts.

    python benchmarks/validate_simulator.py [--backends gloo shm mpi hosts] [--ranks 2 4 8] [--rate 100mbit]

Pings between ranks 0 and 1 give alpha and beta, additions in memory gamma. With these alone the simulator predicts each
call; the error is predicted / measured - 1. The model has a processor for each rank: where ranks outnumber the cores,
they take turns, and errors are large. Hosts are network namespaces of one rank each, whose links `tc` (tbf) limits to
the rate; this needs root.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import unisono as un
from unisono.algorithms import Network, simulate
from unisono.testing.namespaced_ranks import HostRanks, obstacle
from unisono.testing.namespaced_ranks import Network as Hosts
from unisono.tools.bench import on_ranks, shown_size

ALGORITHMS = ("ring", "recursive_doubling", "halving_doubling", "binomial", "two_shot")
SIZES = (8, 64 << 10, 1 << 20)
PINGS = (8, 64 << 10, 1 << 20)
SAMPLES, SAMPLE_S = 5, 0.04


def seconds_of(comm: un.Communicator, call: Callable[[], object]) -> float:
    """Return the median time of a call; all ranks make as many."""
    call()
    comm.barrier()
    begin = time.perf_counter()
    call()
    count = torch.tensor([max(1, min(200, int(SAMPLE_S / (time.perf_counter() - begin))))])
    comm.broadcast(count, src=0)
    samples = []
    for _ in range(SAMPLES):
        comm.barrier()
        begin = time.perf_counter()
        for _ in range(int(count)):
            call()
        samples.append((time.perf_counter() - begin) / int(count))
    return median(samples)


def ping(comm: un.Communicator, nbytes: int) -> float:
    """Return half a round trip between ranks 0 and 1."""
    tensor, other = torch.zeros(nbytes, dtype=torch.uint8), 1 - comm.rank

    def call() -> None:
        if comm.rank < 2:
            for step in (comm.send, comm.recv) if comm.rank == 0 else (comm.recv, comm.send):
                step(tensor, other)

    return seconds_of(comm, call) / 2


def measured(comm: un.Communicator, folder: Path | None = None) -> dict[Any, float]:
    """Return what one rank measures: pings, additions, and every algorithm."""
    torch.set_num_threads(1)
    found: dict[Any, float] = {("ping", nbytes): ping(comm, nbytes) for nbytes in PINGS}
    one, two = torch.zeros(1 << 18), torch.ones(1 << 18)
    found["gamma"] = seconds_of(comm, lambda: one.add_(two)) / (4 << 18)
    for name in ALGORITHMS:
        for nbytes in SIZES:
            tensor = torch.zeros(nbytes // 4)
            found[name, nbytes] = seconds_of(comm, partial(comm.all_reduce, tensor, algorithm=name))
    return found


def fitted(found: dict[Any, float]) -> Network:
    """Return the network of rank 0's pings."""
    short, middle, long = (found["ping", nbytes] for nbytes in PINGS)
    beta = max((long - middle) / (PINGS[2] - PINGS[1]), 1e-12)
    return Network(alpha=short, bandwidth=1 / beta, gamma=found["gamma"])


def run(backend: str, ranks: int, rate: str) -> list[dict[Any, float]]:
    if backend == "hosts":
        with Hosts(ranks, rate=rate) as hosts:
            return HostRanks(hosts, (1,) * ranks, measured, backend="gloo", options=lambda _: {"timeout": 120}).results(
                300
            )
    return on_ranks(measured, ranks, backend, timeout=300)


def report(backend: str, ranks: int, rate: str) -> None:
    results = run(backend, ranks, rate)
    network = fitted(results[0])
    where = f"{backend} at {rate}" if backend == "hosts" else backend
    crowded = ", more than cores" if ranks > (os.cpu_count() or 1) else ""
    print(
        f"\n{where}, {ranks} ranks{crowded}: alpha {network.alpha * 1e6:.1f} us, "
        f"{network.bandwidth / 1e9:.3f} GB/s, gamma {network.gamma * 1e9:.3f} ns"
    )
    print(f"{'algorithm':>20} {'bytes':>8} {'measured us':>12} {'predicted us':>13} {'error':>8}")
    for name in ALGORITHMS:
        for nbytes in SIZES:
            actual = max(result[name, nbytes] for result in results)
            predicted = simulate("all_reduce", name, ranks, nbytes, network=network, itemsize=4).makespan
            print(
                f"{name:>20} {shown_size(nbytes):>8} {actual * 1e6:>12.1f} {predicted * 1e6:>13.1f} "
                f"{predicted / actual - 1:>+8.0%}",
                flush=True,
            )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--backends", nargs="+", default=["gloo", "shm", "mpi", "hosts"])
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    options.add_argument("--rate", default="100mbit")
    given = options.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for backend in given.backends:
        if backend == "hosts" and (reason := obstacle()):
            print(f"\nno throttled hosts: {reason}")
            continue
        for ranks in given.ranks:
            report(backend, ranks, given.rate)


if __name__ == "__main__":
    main()
