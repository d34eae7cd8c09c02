"""Runs ranks as tasks of `mpi4py.futures`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

from unisono.engines.engine import Engine, required
from unisono.errors import CommError

__all__ = ["ENGINE", "Mpi"]


class Mpi(Engine):
    """Engine for MPI, with `mpi4py.futures`: run the script as `mpirun -n RANKS+1 python -m mpi4py.futures SCRIPT`.

    Without mpirun, MPI starts the workers itself if it supports MPI_Comm_spawn. If a process is killed, most MPI
    implementations terminate the whole job, including the caller.

    Args:
        options: Options of `mpi4py.futures.MPIPoolExecutor`, such as `env` or `path`, for workers that MPI starts
            itself.

    Example:
        >>> engine = un.engines.Mpi(env={"OMP_NUM_THREADS": "1"})
    """

    def __init__(self, **options: Any) -> None:
        self._options = options

    @contextmanager
    def workers(self, size: int, timeout_s: float) -> Iterator[Executor]:
        futures = required("mpi4py.futures", "mpi")
        # Don't wait for workers: under mpirun, all processes already exist; otherwise, MPI starts each process together
        # with its task.
        have = required("mpi4py.MPI", "mpi").COMM_WORLD.Get_size() - 1
        if 0 < have < size:
            raise CommError(
                f"this MPI job has {have} workers for {size} ranks; start it by "
                f"mpirun -n {size + 1} python -m mpi4py.futures, or pass a smaller nprocs"
            )
        executor = futures.MPIPoolExecutor(size, **self._options)
        try:
            yield executor
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


ENGINE = Mpi
