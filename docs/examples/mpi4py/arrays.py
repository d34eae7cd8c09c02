"""Point-to-point of NumPy's arrays, which are sent and received in place.

mpirun -n 4 python docs/examples/mpi4py/arrays.py
"""

from __future__ import annotations

import numpy as np

import unisono as un


def run(comm: un.Communicator) -> str:
    """Return what this rank has received."""
    whole, real = np.zeros(1000, dtype="i"), np.zeros(100)
    if comm.rank == 0:
        comm.send(np.arange(1000, dtype="i"), dst=1, tag=77)
        comm.send(np.arange(100, dtype=np.float64), dst=1, tag=13)
    elif comm.rank == 1:
        comm.recv(whole, src=0, tag=77)
        comm.recv(real, src=0, tag=13)
    return f"rank {comm.rank}: {whole.sum()} {real.sum()}"


if __name__ == "__main__":
    with un.init() as comm:
        print(run(comm))
