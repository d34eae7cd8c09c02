"""The program broadcast_dict.py of docs/examples/mpi4py, on mpi4py."""

from mpi4py import MPI

comm = MPI.COMM_WORLD
rank = comm.Get_rank()
data = {"key1": [7, 2.72, 2 + 3j], "key2": ("abc", "xyz")} if rank == 0 else None
print(f"rank {rank}: {comm.bcast(data, root=0)}")
