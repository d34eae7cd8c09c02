"""Start-up time of ranks on each engine, from the call to launch until all have summed 8 bytes and returned.

    python benchmarks/engine_startup.py [--ranks 2 4] [--rounds 3] [--engines local pool ray dask submitit mpi torchrun]

"first" is the first launch of a caller that has imported torch; it starts what the engine needs: the forkserver, the
workers of a pool, a cluster of Ray or Dask on this host, a job. "again" is a further launch in the same program, where
the engine keeps its workers or its cluster. An engine that is not installed is left out. torchrun starts a script.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from _questions import parser

import unisono as un
from unisono.errors import UnavailableError
from unisono.host.mpi_library import find_mpirun, mpirun_environment

ENGINES = ("local", "pool", "ray", "dask", "submitit", "mpi", "torchrun")
LIMIT_S = 300.0


def total(comm: un.Communicator) -> float:
    tensor = torch.ones(2)
    comm.all_reduce(tensor)
    return tensor.sum().item()


@contextmanager
def engine(name: str, ranks: int) -> Iterator[Any]:
    """Return what to pass as `on=`; it keeps what it has started until the end of the context."""
    if name == "pool":
        with ProcessPoolExecutor(ranks, mp_context=get_context("spawn")) as pool:
            yield pool
    elif name == "ray":
        import ray

        ray.init(num_cpus=ranks, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        yield un.engines.Ray()
        ray.shutdown()
    elif name == "dask":
        from dask.distributed import Client, LocalCluster

        options = {"n_workers": ranks, "threads_per_worker": 1, "dashboard_address": None}
        with LocalCluster(**options) as cluster, Client(cluster) as client:
            yield un.engines.Dask(client)
    elif name == "submitit":
        with tempfile.TemporaryDirectory() as folder:
            yield un.engines.Submitit(folder, cluster="local", timeout_min=10)
    else:
        yield name


def measure(name: str, ranks: int) -> list[float]:
    """Return the seconds of a first launch, and of a further one."""
    begun = time.monotonic()
    seconds = []
    with engine(name, ranks) as on:
        for _ in range(2):
            if un.launch(total, ranks, on=on) != [2.0 * ranks] * ranks:
                raise RuntimeError(f"{name}: wrong sums")
            seconds.append(time.monotonic() - begun)
            begun = time.monotonic()
    return seconds


def be_a_rank_of_torchrun() -> None:
    with un.init() as comm:
        total(comm)


def started(name: str, ranks: int, source: Path | None = None) -> list[float]:
    """Measure in a new process, which imports unisono from `source` if given."""
    environment = os.environ | ({"PYTHONPATH": str(source)} if source else {})
    script = [str(Path(__file__).resolve()), "--measure", name, str(ranks)]
    if name == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *script]
        begun = time.monotonic()
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=LIMIT_S)
        return [time.monotonic() - begun]
    command = [sys.executable, *script]
    if name == "mpi":
        mpirun = find_mpirun()
        if mpirun is None:
            raise UnavailableError("there is no mpirun")
        command = [mpirun, "-n", str(ranks + 1), sys.executable, "-m", "mpi4py.futures", *script]
        environment = mpirun_environment(environment, crowded=True)
    ran = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=LIMIT_S)
    seconds: list[float] = json.loads(ran.stdout.splitlines()[-1])
    return seconds


def shown(samples: list[list[float]]) -> str:
    return ", ".join(
        f"{when} {statistics.median(times):.2f} s"
        for when, times in zip(("first", "again"), zip(*samples, strict=True), strict=False)
    )


def compare(given: argparse.Namespace) -> None:
    for name in given.engines:
        for ranks in given.ranks:
            try:
                samples = [started(name, ranks) for _ in range(given.rounds)]
            except (UnavailableError, subprocess.CalledProcessError) as error:
                why = getattr(error, "stderr", None) or error
                print(f"{name}, {ranks} ranks: not measured: {str(why).strip().splitlines()[-1]}", flush=True)
            else:
                print(f"{name}, {ranks} ranks: {shown(samples)}", flush=True)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    options.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.measure is None:
        compare(given)
    elif given.measure[0] == "torchrun":
        be_a_rank_of_torchrun()
    else:
        print(json.dumps(measure(given.measure[0], int(given.measure[1]))), flush=True)


if __name__ == "__main__":
    main()
