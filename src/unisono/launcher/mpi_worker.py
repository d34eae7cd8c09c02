"""One rank that mpirun has started for `launch`: `python -m unisono.launcher.mpi_worker FOLDER`."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from multiprocessing.connection import Client
from pathlib import Path

from unisono.host.mpi_library import launched
from unisono.launcher.mpirun import ORDERS, RANKS
from unisono.launcher.worker import configure_process, run_job

__all__ = ["main"]


def main(folder: Path) -> None:
    """Run the orders in the folder, and report there."""
    found = launched()
    assert found is not None
    assert found.rank is not None
    orders, key, path = pickle.loads((folder / ORDERS).read_bytes())
    sys.path[:] = path
    with Client(str(folder / RANKS), authkey=key) as report:
        report.send(found.rank)
        configure_process(orders.threads)
        report.send_bytes(run_job(replace(orders, rank=found.rank)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
