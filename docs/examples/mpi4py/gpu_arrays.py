"""All-reduce of what any library holds: with CuPy on GPUs, here with NumPy by way of DLPack.

mpirun -n 4 python docs/examples/mpi4py/gpu_arrays.py
"""

from __future__ import annotations

import numpy as np
import torch

import unisono as un


def run(comm: un.Communicator) -> str:
    """Return the sum of the arrays of all ranks."""
    given = np.arange(10, dtype="i")
    taken = torch.from_dlpack(given).clone()  # as cupy.from_dlpack does on a GPU
    comm.all_reduce(taken)
    assert np.allclose(taken, given * comm.size)
    return f"rank {comm.rank}: {taken.tolist()}"


if __name__ == "__main__":
    with un.init() as comm:
        print(run(comm))
