"""The program gpu_arrays.py of docs/examples/mpi4py, on mpi4py."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank = comm.Get_rank()
given = np.arange(10, dtype="i")
taken = np.empty_like(given)
comm.Allreduce(given, taken)
print(f"rank {rank}: {taken.tolist()}")
