"""Persistent requests: the same messages around a ring, many times.

mpirun -n 4 python docs/examples/mpi4py/persistent.py
"""

from __future__ import annotations

from functools import partial

import numpy as np

import unisono as un


def run(comm: un.Communicator) -> str:
    """Return the number that has come around."""
    given, taken = np.array([float(comm.rank)]), np.zeros(1)
    requests = [
        partial(comm.isend, given, (comm.rank + 1) % comm.size, tag=5),
        partial(comm.irecv, taken, (comm.rank - 1) % comm.size, tag=5),
    ]
    for _ in range(comm.size):
        works = [start() for start in requests]
        for work in works:
            work.wait()
        given[:] = taken * 2
    return f"rank {comm.rank}: {taken.tolist()}"


if __name__ == "__main__":
    with un.init() as comm:
        print(run(comm))
