"""The program nonblocking_collectives.py of docs/examples/mpi4py, on mpi4py."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank = comm.Get_rank()
total, data = np.full(4, float(rank)), np.arange(4, dtype="i") * (rank == 0)
data = data.astype("i")
requests = [comm.Iallreduce(MPI.IN_PLACE, total, op=MPI.SUM), comm.Ibcast(data, root=0)]
meanwhile = sum(range(1000))
MPI.Request.Waitall(requests)
print(f"rank {rank}: {total.tolist()} {data.tolist()} {meanwhile}")
