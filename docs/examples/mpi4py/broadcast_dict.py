"""Broadcast of a dict.

mpirun -n 4 python docs/examples/mpi4py/broadcast_dict.py
"""

from __future__ import annotations

import unisono as un


def run(comm: un.Communicator) -> str:
    """Return the dict of rank 0."""
    data = {"key1": [7, 2.72, 2 + 3j], "key2": ("abc", "xyz")} if comm.rank == 0 else None
    return f"rank {comm.rank}: {comm.broadcast_object(data, src=0)}"


if __name__ == "__main__":
    with un.init() as comm:
        print(run(comm))
