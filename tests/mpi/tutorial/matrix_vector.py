"""The program matrix_vector.py of docs/examples/mpi4py, on mpi4py."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
count = 3
first = rank * count
rows = np.arange(first * count * size, (first + count) * count * size, dtype=float).reshape(count, -1)
part, whole = np.arange(first, first + count, dtype=float), np.zeros(size * count)
comm.Allgather([part, MPI.DOUBLE], [whole, MPI.DOUBLE])
print(f"rank {rank}: {(rows @ whole).tolist()}")
