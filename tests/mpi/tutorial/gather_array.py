"""The program gather_array.py of docs/examples/mpi4py, on mpi4py."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
mine = np.full(100, rank, dtype="i")
rows = np.empty((size, 100), dtype="i") if rank == 0 else None
comm.Gather(mine, rows, root=0)
print(f"rank {rank}: {rows.sum(axis=1).tolist() if rank == 0 else None}")
