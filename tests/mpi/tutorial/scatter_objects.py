"""The program scatter_objects.py of docs/examples/mpi4py, on mpi4py."""

from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
squares = [(i + 1) ** 2 for i in range(size)] if rank == 0 else None
print(f"rank {rank}: {comm.scatter(squares, root=0)}")
