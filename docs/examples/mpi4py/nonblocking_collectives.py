"""Collectives without blocking: compute between start and wait.

mpirun -n 4 python docs/examples/mpi4py/nonblocking_collectives.py
"""

from __future__ import annotations

import numpy as np

import unisono as un


def run(comm: un.Communicator) -> str:
    """Return a sum and a broadcast array."""
    total, data = np.full(4, float(comm.rank)), np.arange(4, dtype="i") * (comm.rank == 0)
    works = [comm.all_reduce(total, async_op=True), comm.broadcast(data, src=0, async_op=True)]
    meanwhile = sum(range(1000))
    for work in works:
        work.wait()
    return f"rank {comm.rank}: {total.tolist()} {data.tolist()} {meanwhile}"


if __name__ == "__main__":
    with un.init() as comm:
        print(run(comm))
