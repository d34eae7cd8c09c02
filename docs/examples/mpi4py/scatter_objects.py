"""Scatter of Python's objects: one for each rank.

mpirun -n 4 python docs/examples/mpi4py/scatter_objects.py
"""

from __future__ import annotations

import unisono as un


def run(comm: un.Communicator) -> str:
    """Return this rank's object."""
    squares = [(i + 1) ** 2 for i in range(comm.size)] if comm.rank == 0 else None
    data = comm.scatter_object(squares, src=0)
    assert data == (comm.rank + 1) ** 2
    return f"rank {comm.rank}: {data}"


if __name__ == "__main__":
    with un.init() as comm:
        print(run(comm))
