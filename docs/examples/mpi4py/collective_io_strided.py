"""One file in which ranks take turns: each writes every size-th number, by a map of the file.

mpirun -n 4 python docs/examples/mpi4py/collective_io_strided.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import unisono as un


def run(comm: un.Communicator) -> str:
    """Return the file's numbers as rank 0 reads them."""
    path = Path(comm.broadcast_object(tempfile.mkdtemp() if comm.rank == 0 else None)) / "data"
    count = 10
    if comm.rank == 0:
        np.zeros(count * comm.size, dtype="i").tofile(path)
    comm.barrier()
    shared = np.memmap(path, dtype="i", mode="r+")
    shared[comm.rank :: comm.size] = comm.rank
    shared.flush()
    comm.barrier()
    return f"rank {comm.rank}: {np.fromfile(path, dtype='i').tolist() if comm.rank == 0 else None}"


if __name__ == "__main__":
    with un.init() as comm:
        print(run(comm))
