"""The program gather_objects.py of docs/examples/mpi4py, on mpi4py."""

from mpi4py import MPI

comm = MPI.COMM_WORLD
rank = comm.Get_rank()
print(f"rank {rank}: {comm.gather((rank + 1) ** 2, root=0)}")
