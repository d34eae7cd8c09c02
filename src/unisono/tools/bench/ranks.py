"""Measuring ranks of this host, one thread each."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import unisono as un
from unisono.communicator import Communicator
from unisono.core.transport import Options
from unisono.launcher.job import Job, conclude
from unisono.tools.bench.measure import measure
from unisono.tools.bench.result import Result
from unisono.tools.bench.settings import Settings
from unisono.tools.bench.table import heading, line
from unisono.transports.hierarchical import transport_named

__all__ = ["on_ranks", "run"]

_TIMEOUT_S = 120.0


def run(settings: Settings, *, shown: bool = False) -> list[Result]:
    """Measure on ranks of this host, one thread each.

    Args:
        settings: What to measure.
        shown: Whether to print the table, each line as soon as it is known.

    Returns:
        A result for each size.

    Example:
        >>> results = run(Settings(backend="thread", sizes=(1024,), seconds=0.01))
        >>> results[0].count, results[0].wrong
        (256, 0)
    """
    if shown:
        print(heading(settings), flush=True)
    found = on_ranks(
        _rank, settings.ranks, settings.chosen_backend, (settings, shown), under_mpirun=settings.started_by_mpi
    )
    results: list[Result] = found[0]
    return results


def on_ranks(
    program: Callable[..., Any],
    ranks: int,
    backend: str,
    args: tuple[Any, ...] = (),
    *,
    under_mpirun: bool = False,
    timeout: float = _TIMEOUT_S,
) -> list[Any]:
    """Run `program(comm, *args, folder)` on ranks of one thread each, and return each rank's result.

    Args:
        program: As for `unisono.launch`.
        ranks, backend: As for `unisono.launch`.
        args: As for `unisono.launch`. An empty folder visible to all ranks is appended; it is removed afterwards.
        under_mpirun: Whether mpirun starts the ranks, whatever the backend, so that MPI works in them.
        timeout: Seconds that an operation may take.
    """
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as name, _one_thread():
        given = (*args, Path(name))
        if not under_mpirun:
            return un.launch(program, ranks, backend, given, threads=1, timeout=timeout)
        from unisono.launcher.mpirun import run_mpirun

        options = Options(backend, timeout_s=timeout)
        job = Job(program, given, {}, transport_named(backend), options, "auto", None)
        return conclude(run_mpirun(job, ranks, "end", 1), ranks, "end")


def _rank(comm: Communicator, settings: Settings, shown: bool, folder: Path) -> list[Result]:
    def report(result: Result) -> None:
        if shown and comm.rank == 0:
            print(line(result), flush=True)

    return measure(comm, settings, folder, report)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread, also for ranks that are threads of this process. Flush output before ranks print."""
    sys.stdout.flush()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
