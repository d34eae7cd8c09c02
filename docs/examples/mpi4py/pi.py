"""Pi by workers that the program starts itself, and that end with their work.

python docs/examples/mpi4py/pi.py
"""

from __future__ import annotations

import unisono as un


def worker(comm: un.Communicator) -> float:
    """Return the sum of all ranks, each of which adds every size-th of the rectangles under 4 / (1 + x * x)."""
    count = [100] if comm.rank == 0 else [0]
    comm.broadcast(count, src=0)
    width = 1.0 / count[0]
    heights = (4.0 / (1.0 + (width * (i + 0.5)) ** 2) for i in range(comm.rank, count[0], comm.size))
    pi = [sum(heights) * width]
    comm.reduce(pi, dst=0)
    return pi[0]


def main(backend: str = "shm") -> str:
    """Return what rank 0 of five workers has found."""
    return f"pi is about {un.launch(worker, nprocs=5, backend=backend)[0]:.10f}"


if __name__ == "__main__":
    print(main())
