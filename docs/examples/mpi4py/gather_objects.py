"""Gather of Python's objects: one from each rank.

mpirun -n 4 python docs/examples/mpi4py/gather_objects.py
"""

from __future__ import annotations

import unisono as un


def run(comm: un.Communicator) -> str:
    """Return all objects on rank 0, and None elsewhere."""
    data = comm.gather_object((comm.rank + 1) ** 2, dst=0)
    return f"rank {comm.rank}: {data}"


if __name__ == "__main__":
    with un.init() as comm:
        print(run(comm))
