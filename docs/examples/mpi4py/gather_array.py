"""Gather of arrays into the rows of one.

mpirun -n 4 python docs/examples/mpi4py/gather_array.py
"""

from __future__ import annotations

import numpy as np

import unisono as un


def run(comm: un.Communicator) -> str:
    """Return the sums of all rows on rank 0."""
    mine = np.full(100, comm.rank, dtype="i")
    rows = np.empty((comm.size, 100), dtype="i")
    comm.gather(mine, list(rows) if comm.rank == 0 else None, dst=0)  # a row is a view of the array
    return f"rank {comm.rank}: {rows.sum(axis=1).tolist() if comm.rank == 0 else None}"


if __name__ == "__main__":
    with un.init() as comm:
        print(run(comm))
