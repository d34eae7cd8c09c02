"""Product of a matrix and a vector, of which each rank has some rows and some elements.

mpirun -n 4 python docs/examples/mpi4py/matrix_vector.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import unisono as un


def product(comm: un.Communicator, rows: np.ndarray[Any, Any], part: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return this rank's elements of the product."""
    whole = np.zeros(comm.size * len(part))
    comm.all_gather_single(whole, part)
    result: np.ndarray[Any, Any] = rows @ whole
    return result


def run(comm: un.Communicator) -> str:
    """Return this rank's elements of the product."""
    count = 3
    first = comm.rank * count
    rows = np.arange(first * count * comm.size, (first + count) * count * comm.size, dtype=float)
    part = np.arange(first, first + count, dtype=float)
    return f"rank {comm.rank}: {product(comm, rows.reshape(count, -1), part).tolist()}"


if __name__ == "__main__":
    with un.init() as comm:
        print(run(comm))
