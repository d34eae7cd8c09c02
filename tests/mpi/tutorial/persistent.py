"""The program persistent.py of docs/examples/mpi4py, on mpi4py."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
given, taken = np.array([float(rank)]), np.zeros(1)
requests = [comm.Send_init(given, (rank + 1) % size, tag=5), comm.Recv_init(taken, (rank - 1) % size, tag=5)]
for _ in range(size):
    MPI.Prequest.Startall(requests)
    MPI.Request.Waitall(requests)
    given[:] = taken * 2
print(f"rank {rank}: {taken.tolist()}")
