"""Heat in a rod, by mpi4py and NumPy: the program that mpi4py_after.py converts.

mpirun -n 4 python docs/examples/coming_from/mpi4py_before.py
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI


def solve(comm: MPI.Intracomm, cells: int = 50, tolerance: float = 1e-4) -> tuple[int, float]:
    """Let heat spread from the left end of a rod, of which each rank has some cells; steps, and the mean heat."""
    rank, size = comm.Get_rank(), comm.Get_size()
    mine = len(range(rank, cells, size))
    left, right = (rank - 1 if rank else MPI.PROC_NULL), (rank + 1 if rank + 1 < size else MPI.PROC_NULL)
    heat = np.zeros(mine + 2)  # one more cell at each end, which is a copy of a neighbour's
    heat[0] = 1.0 if rank == 0 else 0.0
    change, steps = np.ones(1), 0
    while change[0] > tolerance:
        comm.Sendrecv(heat[-2:-1], right, recvbuf=heat[:1], source=left)
        comm.Sendrecv(heat[1:2], left, recvbuf=heat[-1:], source=right)
        new = (heat[:-2] + heat[2:]) / 2
        change[0] = np.abs(new - heat[1:-1]).max()
        heat[1:-1] = new
        comm.Allreduce(MPI.IN_PLACE, change, op=MPI.MAX)
        steps += 1
    lengths = comm.allgather(mine)
    whole = np.empty(cells) if rank == 0 else None
    comm.Gatherv(heat[1:-1], (whole, lengths), root=0)
    return steps, comm.bcast(float(whole.mean()) if rank == 0 else None, root=0)


if __name__ == "__main__":
    steps, mean = solve(MPI.COMM_WORLD)
    if MPI.COMM_WORLD.Get_rank() == 0:
        print(f"{steps} steps, mean heat {mean:.12f}")
