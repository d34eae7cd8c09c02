"""One rank under mpirun: `python -m unisono.bench.mpi_rank FOLDER`, which holds the job and takes the result."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import cloudpickle
import torch

import unisono as un
from unisono.bench.mpirun import JOB, RESULT

__all__ = ["main"]

_TIMEOUT_S = 120.0


def main(folder: Path) -> None:
    """Join the others, run the job, and, on rank 0, leave its result. An error ends all ranks."""
    import mpi4py

    # Only one thread calls MPI, which then needs no locks.
    mpi4py.rc.thread_level = "funneled"
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    torch.set_num_threads(1)
    try:
        program, backend, args = cloudpickle.loads((folder / JOB).read_bytes())
        meeting = (folder / "meeting").as_uri()
        with un.init(backend, init_method=meeting, rank=world.rank, world_size=world.size, timeout=_TIMEOUT_S) as comm:
            result = program(comm, *args)
        if world.rank == 0:
            (folder / RESULT).write_bytes(cloudpickle.dumps(result))
    except BaseException:
        # An exception alone would leave the other ranks waiting for ever.
        traceback.print_exc()
        sys.stderr.flush()
        world.Abort(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
