"""Scatter of the rows of an array.

mpirun -n 4 python docs/examples/mpi4py/scatter_array.py
"""

from __future__ import annotations

import numpy as np

import unisono as un


def run(comm: un.Communicator) -> str:
    """Return the sum of this rank's row."""
    rows = np.repeat(np.arange(comm.size, dtype="i"), 100).reshape(comm.size, 100)
    mine = np.empty(100, dtype="i")
    comm.scatter(mine, list(rows) if comm.rank == 0 else None, src=0)
    assert (mine == comm.rank).all()
    return f"rank {comm.rank}: {mine.sum()}"


if __name__ == "__main__":
    with un.init() as comm:
        print(run(comm))
