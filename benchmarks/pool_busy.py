"""Busy time of a pool's two workers, compared with concurrent.futures and mpi4py.futures.

    python benchmarks/pool_busy.py [--tasks 10000] [--task-us 20] [--rounds 7] [--backends shm gloo]

`map` over tasks that compute for so many microseconds and return the time that they took, on two workers. Busy is the
sum of these times over the wall time of both workers, from the call of `map` until its last result. Each pool runs in
turn; the median of the rounds is shown, with the least and the most. Then single submits of an empty task: all are
submitted, then all results are awaited.

Other pools have chunks of 1 (what they do if not asked otherwise) and of an eighth of a worker's share. mpi4py runs
in a process of its own, under mpirun.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from statistics import median
from typing import Any

from _questions import parser

import unisono as un
from unisono.host.mpi_library import find_mpirun, mpirun_environment
from unisono.host.processors import cores

WORKERS = 2
SUBMITS = 3000
BOUND = 0.85


def compute(seconds: float) -> float:
    """Return the time that it computed."""
    began = now = time.perf_counter()
    while now - began < seconds:
        now = time.perf_counter()
    return now - began


def nothing() -> None:
    """The empty task."""


def busy(pool: Executor, tasks: int, seconds: float, **chunks: Any) -> float:
    """Return the busy part of the workers' time."""
    began = time.perf_counter()
    times = list(pool.map(compute, [seconds] * tasks, **chunks))
    wall = time.perf_counter() - began
    assert len(times) == tasks
    return sum(times) / (wall * WORKERS)


def submits(pool: Executor) -> float:
    """Return single submits per second."""
    began = time.perf_counter()
    for future in [pool.submit(nothing) for _ in range(SUBMITS)]:
        future.result()
    return SUBMITS / (time.perf_counter() - began)


def measure(
    pools: dict[str, Executor], tasks: int, seconds: float, rounds: int
) -> dict[str, tuple[list[float], float]]:
    """Return the busy parts of each pool and each kind of chunk, and the pool's rate of submits."""
    share = max(1, tasks // WORKERS // 8)
    kinds = {
        (name, chunk): {} if isinstance(pool, un.Pool) else {"chunksize": chunk}
        for name, pool in pools.items()
        for chunk in ((0,) if isinstance(pool, un.Pool) else (1, share))
    }
    for pool in pools.values():
        list(pool.map(compute, [seconds] * 100))
    found: dict[tuple[str, int], list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for (name, chunk), chunks in kinds.items():
            found[name, chunk].append(busy(pools[name], tasks, seconds, **chunks))
    rates = {name: median(submits(pool) for _ in range(rounds)) for name, pool in pools.items()}
    return {
        f"{name}, {f'chunks of {chunk}' if chunk else 'adaptive chunks'}": (parts, rates[name])
        for (name, chunk), parts in found.items()
    }


def under_mpi(tasks: int, seconds: float, rounds: int) -> dict[str, tuple[list[float], float]]:
    """Return what mpi4py's pool of three ranks measures: one gives the tasks, two are workers."""
    mpirun = find_mpirun()
    if mpirun is None:
        return {}
    command = [mpirun, "-n", str(WORKERS + 1), sys.executable, "-m", "mpi4py.futures", __file__]
    command += ["--inside-mpi", "--tasks", str(tasks), "--task-us", str(seconds * 1e6), "--rounds", str(rounds)]
    environment = mpirun_environment(os.environ, crowded=cores() <= WORKERS)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        print(f"mpi4py.futures cannot run here: {ended.stderr.strip().splitlines()[-1:]}")
        return {}
    found: dict[str, tuple[list[float], float]] = json.loads(ended.stdout.splitlines()[-1])
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tasks", type=int, default=10_000)
    options.add_argument("--task-us", type=float, default=20.0)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--backends", nargs="+", default=["shm", "gloo"])
    options.add_argument("--inside-mpi", action="store_true", help="what mpirun starts")
    given = options.parse_args()
    seconds = given.task_us * 1e-6
    if given.inside_mpi:
        from mpi4py.futures import MPIPoolExecutor

        with MPIPoolExecutor() as pool:
            print(json.dumps(measure({"mpi4py.futures": pool}, given.tasks, seconds, given.rounds)))
        return
    with ExitStack() as stack:
        pools: dict[str, Executor] = {
            f"un.Pool on {backend}": stack.enter_context(un.Pool(WORKERS, backend=backend))
            for backend in given.backends
        }
        pools["ProcessPoolExecutor"] = stack.enter_context(ProcessPoolExecutor(WORKERS))
        found = measure(pools, given.tasks, seconds, given.rounds)
    found |= under_mpi(given.tasks, seconds, given.rounds)
    print(f"{given.tasks} tasks of {given.task_us:g} us on {WORKERS} workers, median of {given.rounds} (least to most)")
    for name, (parts, rate) in found.items():
        print(f"  {name:45} busy {median(parts):4.0%} ({min(parts):.0%} to {max(parts):.0%}), {rate:7,.0f} submits/s")
    reached = median(found["un.Pool on shm, adaptive chunks"][0]) if "shm" in given.backends else BOUND
    print(f"{'PASS' if reached >= BOUND else 'FAIL'}: busy on shm at least {BOUND:.0%}")


if __name__ == "__main__":
    main()
