"""The program pi.py of docs/examples/mpi4py, on mpi4py: it starts pi_worker.py."""

import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_SELF.Spawn(sys.executable, args=[str(Path(__file__).with_name("pi_worker.py"))], maxprocs=5)
count, pi = np.array(100, "i"), np.array(0.0, "d")
comm.Bcast([count, MPI.INT], root=MPI.ROOT)
comm.Reduce(None, [pi, MPI.DOUBLE], op=MPI.SUM, root=MPI.ROOT)
print(f"pi is about {pi:.10f}")
comm.Disconnect()
