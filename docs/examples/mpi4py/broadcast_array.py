"""Broadcast of an array, in place.

mpirun -n 4 python docs/examples/mpi4py/broadcast_array.py
"""

from __future__ import annotations

import numpy as np

import unisono as un


def run(comm: un.Communicator) -> str:
    """Return the sum of the array of rank 0."""
    data = np.arange(100, dtype="i") if comm.rank == 0 else np.empty(100, dtype="i")
    comm.broadcast(data, src=0)
    assert (data == np.arange(100)).all()
    return f"rank {comm.rank}: {data.sum()}"


if __name__ == "__main__":
    with un.init() as comm:
        print(run(comm))
