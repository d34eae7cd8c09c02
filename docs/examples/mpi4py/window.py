"""Memory of rank 0 that other ranks write and read: by calls, because unisono has no one-sided windows.

mpirun -n 4 python docs/examples/mpi4py/window.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import unisono as un

window = np.zeros(8, dtype="i")


@un.rpc.expose
def put(first: int, numbers: np.ndarray[Any, Any]) -> None:
    """Replace elements of the window."""
    window[first : first + len(numbers)] = numbers


@un.rpc.expose
def get(first: int, count: int) -> np.ndarray[Any, Any]:
    """Return a copy of elements of the window."""
    return window[first : first + count].copy()


def run(comm: un.Communicator) -> str:
    """Return the window after all ranks have written their elements."""
    un.rpc.init(comm)
    un.rpc.rpc_sync(0, put, args=(2 * comm.rank, np.full(2, comm.rank + 1, dtype="i")))
    comm.barrier()
    whole = un.rpc.rpc_sync(0, get, args=(0, 2 * comm.size))
    un.rpc.shutdown()
    return f"rank {comm.rank}: {whole.tolist()}"


if __name__ == "__main__":
    with un.init() as comm:
        print(run(comm))
