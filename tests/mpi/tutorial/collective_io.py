"""The program collective_io.py of docs/examples/mpi4py, on mpi4py."""

import tempfile
from pathlib import Path

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank = comm.Get_rank()
path = Path(comm.bcast(tempfile.mkdtemp() if rank == 0 else None)) / "data"
mine = np.full(10, rank, dtype="i")
file = MPI.File.Open(comm, str(path), MPI.MODE_WRONLY | MPI.MODE_CREATE)
file.Write_at_all(rank * mine.nbytes, mine)
file.Close()
print(f"rank {rank}: {np.fromfile(path, dtype='i').tolist() if rank == 0 else None}")
