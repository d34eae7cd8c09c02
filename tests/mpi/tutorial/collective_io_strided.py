"""The program collective_io_strided.py of docs/examples/mpi4py, on mpi4py."""

import tempfile
from pathlib import Path

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
path = Path(comm.bcast(tempfile.mkdtemp() if rank == 0 else None)) / "data"
count = 10
mine = np.full(count, rank, dtype="i")
file = MPI.File.Open(comm, str(path), MPI.MODE_WRONLY | MPI.MODE_CREATE)
every = MPI.INT.Create_vector(count, 1, size).Commit()
file.Set_view(rank * mine.itemsize, filetype=every)
file.Write_all(mine)
every.Free()
file.Close()
print(f"rank {rank}: {np.fromfile(path, dtype='i').tolist() if rank == 0 else None}")
