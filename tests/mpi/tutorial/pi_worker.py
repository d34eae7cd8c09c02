"""The workers of pi.py."""

import numpy as np
from mpi4py import MPI

comm = MPI.Comm.Get_parent()
rank, size = comm.Get_rank(), comm.Get_size()
count = np.array(0, "i")
comm.Bcast([count, MPI.INT], root=0)
width = 1.0 / int(count)
heights = (4.0 / (1.0 + (width * (i + 0.5)) ** 2) for i in range(rank, int(count), size))
pi = np.array(sum(heights) * width, "d")
comm.Reduce([pi, MPI.DOUBLE], None, op=MPI.SUM, root=0)
comm.Disconnect()
