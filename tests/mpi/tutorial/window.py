"""The program window.py of docs/examples/mpi4py, on mpi4py."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
count = 2 * size
window = MPI.Win.Allocate(count * 4 if rank == 0 else 0, 4, comm=comm)
mine, whole = np.full(2, rank + 1, dtype="i"), np.zeros(count, dtype="i")
window.Lock(0)
window.Put(mine, 0, target=(2 * rank, 2, MPI.INT))
window.Unlock(0)
comm.Barrier()
window.Lock(0)
window.Get(whole, 0, target=(0, count, MPI.INT))
window.Unlock(0)
print(f"rank {rank}: {whole.tolist()}")
window.Free()
