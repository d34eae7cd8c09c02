"""The program broadcast_array.py of docs/examples/mpi4py, on mpi4py."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank = comm.Get_rank()
data = np.arange(100, dtype="i") if rank == 0 else np.empty(100, dtype="i")
comm.Bcast(data, root=0)
print(f"rank {rank}: {data.sum()}")
