"""The program arrays.py of docs/examples/mpi4py, on mpi4py."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank = comm.Get_rank()
whole, real = np.zeros(1000, dtype="i"), np.zeros(100)
if rank == 0:
    comm.Send([np.arange(1000, dtype="i"), MPI.INT], dest=1, tag=77)
    comm.Send(np.arange(100, dtype=np.float64), dest=1, tag=13)
elif rank == 1:
    comm.Recv([whole, MPI.INT], source=0, tag=77)
    comm.Recv(real, source=0, tag=13)
print(f"rank {rank}: {whole.sum()} {real.sum()}")
