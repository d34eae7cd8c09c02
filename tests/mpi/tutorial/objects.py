"""The program objects.py of docs/examples/mpi4py, on mpi4py."""

from mpi4py import MPI

comm = MPI.COMM_WORLD
rank = comm.Get_rank()
data = None
if rank == 0:
    comm.send({"a": 7, "b": 3.14}, dest=1, tag=11)
elif rank == 1:
    data = comm.recv(source=0, tag=11)
print(f"rank {rank}: {data}")
