"""One file of all ranks' arrays, each at its place. unisono has no parallel files: Python writes it.

mpirun -n 4 python docs/examples/mpi4py/collective_io.py
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

import unisono as un


def run(comm: un.Communicator) -> str:
    """Return the file's numbers as rank 0 reads them."""
    path = Path(comm.broadcast_object(tempfile.mkdtemp() if comm.rank == 0 else None)) / "data"
    mine = np.full(10, comm.rank, dtype="i")
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.pwrite(file, mine.data, comm.rank * mine.nbytes)
    os.close(file)
    comm.barrier()
    return f"rank {comm.rank}: {np.fromfile(path, dtype='i').tolist() if comm.rank == 0 else None}"


if __name__ == "__main__":
    with un.init() as comm:
        print(run(comm))
