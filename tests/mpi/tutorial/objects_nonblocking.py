"""The program objects_nonblocking.py of docs/examples/mpi4py, on mpi4py."""

from mpi4py import MPI

comm = MPI.COMM_WORLD
rank = comm.Get_rank()
data = None
if rank == 0:
    comm.isend({"a": 7, "b": 3.14}, dest=1, tag=11).wait()
elif rank == 1:
    data = comm.irecv(source=0, tag=11).wait()
print(f"rank {rank}: {data}")
