"""The program scatter_array.py of docs/examples/mpi4py, on mpi4py."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
rows = np.repeat(np.arange(size, dtype="i"), 100).reshape(size, 100) if rank == 0 else None
mine = np.empty(100, dtype="i")
comm.Scatter(rows, mine, root=0)
print(f"rank {rank}: {mine.sum()}")
