"""Starts ranks, has them measure, and brings back the rows."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import torch

import unisono as un
from unisono.bench.measure import measure
from unisono.bench.mpirun import JOB, RESULT, run_under_mpi
from unisono.bench.row import Row
from unisono.bench.settings import Settings
from unisono.bench.table import heading, line
from unisono.communicator import Communicator

__all__ = ["on_ranks", "run"]

_TIMEOUT_S = 120.0
_START_S = 120.0
_SIZE_S = 300.0


def run(settings: Settings, *, shown: bool = False) -> list[Row]:
    """Measure on ranks of this host, one thread each.

    Args:
        settings: What to measure.
        shown: Whether to print the table, each line as soon as it is known.

    Returns:
        A row for each size.

    Example:
        >>> rows = run(Settings(backend="thread", sizes=(1024,), seconds=0.01))
        >>> rows[0].count, rows[0].wrong
        (256, 0)
    """
    if shown:
        print(heading(settings), flush=True)
    limit_s = _START_S + len(settings.sizes) * (_SIZE_S + 3 * settings.seconds)
    rows = on_ranks(
        _rank, settings.ranks, settings.chosen_backend, (settings, shown), mpi=settings.started_by_mpi, limit_s=limit_s
    )
    assert isinstance(rows, list)
    return rows


def on_ranks(
    program: Callable[..., Any],
    ranks: int,
    backend: str,
    args: tuple[Any, ...],
    *,
    mpi: bool = False,
    limit_s: float = _START_S + _SIZE_S,
) -> Any:
    """What `program(comm, *args, folder)` returns on rank 0; `folder` is empty, seen by all ranks, and goes afterwards.

    Args:
        program: As for `unisono.launch`.
        ranks, backend: Likewise.
        args: Likewise.
        mpi: Whether mpirun starts the ranks, so that MPI works in them.
        limit_s: How long they may take under mpirun.
    """
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as name, _one_thread():
        folder = Path(name)
        if not mpi:
            return un.launch(program, ranks, backend, (*args, folder), threads=1, timeout=_TIMEOUT_S)[0]
        job = cloudpickle.dumps((program, backend, (*args, folder)))
        (folder / JOB).write_bytes(job)
        run_under_mpi(folder, ranks, limit_s)
        return cloudpickle.loads((folder / RESULT).read_bytes())


def _rank(comm: Communicator, settings: Settings, shown: bool, folder: Path) -> list[Row]:
    def tell(row: Row) -> None:
        if shown and comm.rank == 0:
            print(line(row), flush=True)

    return measure(comm, settings, folder, tell)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Also for ranks that are threads of this process. What was printed goes out before ranks print."""
    sys.stdout.flush()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
