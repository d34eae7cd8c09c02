"""Starts the benchmark's ranks on this host, with one thread per rank, and measures collectives on them."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import unisono as un
from unisono.communicator import Communicator
from unisono.launcher.api import job_of
from unisono.launcher.job import conclude
from unisono.tools.bench.peers import PEERS, Peer
from unisono.tools.bench.peers.unisono import UnisonoPeer
from unisono.tools.bench.result import Against, Result, heading, line
from unisono.tools.bench.settings import Settings
from unisono.tools.bench.timings import clock, interleave
from unisono.tools.bench.workload import Slot, SlotPool, Workload

__all__ = ["measure", "on_ranks", "one_thread", "run"]

_TIMEOUT_S = 120.0


def run(settings: Settings, *, shown: bool = False) -> list[Result]:
    """Start ranks on this host, with one thread per rank, and measure a collective on them.

    Args:
        settings: What to measure.
        shown: Whether to print the table, line by line as results become available.

    Returns:
        One result per size.

    Example:
        >>> results = run(Settings(backend="thread", sizes=(1024,), seconds=0.01))
        >>> results[0].count, results[0].wrong
        (256, 0)
    """
    if shown:
        print(heading(settings), flush=True)
    found = on_ranks(
        measure, settings.ranks, settings.chosen_backend, (settings, shown), under_mpirun=settings.started_by_mpi
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
    """Run `program(comm, *args, folder)` on ranks with one thread each, and return each rank's result.

    Args:
        program: As for `unisono.launch`.
        ranks, backend: As for `unisono.launch`.
        args: As for `unisono.launch`. One more argument follows: an empty folder that all ranks can access. It is
            removed afterwards.
        under_mpirun: Whether to start the ranks with mpirun, whatever the backend, so that they can also use MPI.
        timeout: Maximum duration of an operation, in seconds.
    """
    # Flush earlier output, so that it appears before the ranks' output.
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as name, one_thread():
        given = (*args, Path(name))
        if not under_mpirun:
            return un.launch(program, ranks, backend, given, threads=1, timeout=timeout)
        from unisono.launcher.mpirun import MpirunRanks

        job = job_of(program, ranks, backend, given, timeout=timeout)
        with MpirunRanks(job, ranks, "end", 1) as started:
            return conclude(started.run(), ranks, "end")


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread, for ranks that are threads of this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_OWN = ""
"""Name of unisono among the candidates. No peer has this name."""


def measure(comm: Communicator, settings: Settings, shown: bool, folder: Path) -> list[Result]:
    """Return a result for each size, the same on every rank. Collective over `comm`.

    Args:
        comm: Communicator of `settings.ranks` ranks.
        settings: What to measure.
        shown: Whether rank 0 prints each result as soon as it is available.
        folder: An empty folder that all ranks can access.
    """
    with ExitStack() as stack:
        candidates: dict[str, Peer] = {_OWN: UnisonoPeer(comm, folder, settings.algorithm)}
        for name in settings.against:
            candidates[name] = PEERS[name](comm, folder)
            stack.callback(candidates[name].close)
        results = []
        for workload in settings.workloads:
            results.append(_measured(comm, settings, workload, candidates))
            if shown and comm.rank == 0:
                print(line(results[-1]), flush=True)
        # Wait for all ranks, so that no rank closes a connection that another rank is still using.
        comm.barrier()
        return results


def _measured(comm: Communicator, settings: Settings, workload: Workload, candidates: dict[str, Peer]) -> Result:
    """Measure all candidates on one workload."""
    rank = comm.rank
    cold = settings.cold
    ordinary = partial(torch.empty, dtype=workload.dtype)
    registered = partial(comm.empty, dtype=workload.dtype)
    own = SlotPool(workload, registered if settings.registered else ordinary, cold=cold)
    apart = settings.registered and settings.against
    others = SlotPool(workload, ordinary, cold=cold) if apart else own
    for pool in {own, others}:
        pool.fill(rank)
    wrong = dict.fromkeys(candidates, 0)

    # Cached, because slots don't change during a measurement.
    @cache
    def bound(name: str, slot: Slot) -> Callable[[], object]:
        return candidates[name].bind(workload, slot)

    def sample(name: str) -> float:
        """Time a few calls on fresh data, verify them, and prepare the next sample."""
        slots = (own if name == _OWN else others).next()
        calls = [bound(name, slot) for slot in slots]
        if not cold:
            for slot in slots:
                workload.fill(slot, rank)
        seconds = clock(calls, comm)
        for slot in slots:
            if candidates[name].verified:
                wrong[name] += workload.wrong(slot, rank)
            if cold:
                workload.fill(slot, rank)
        return seconds

    algorithm = _chosen(candidates[_OWN], workload, own.next()[0], rank)
    samples = {name: partial(sample, name) for name in candidates}
    timings = interleave(samples, comm, seconds=settings.seconds, least=settings.least).slowest(comm)
    counts = torch.tensor(list(wrong.values()))
    comm.all_reduce(counts)
    totals = dict(zip(wrong, counts.tolist(), strict=True))
    return Result(
        workload.collective,
        workload.ranks,
        workload.nbytes,
        workload.count,
        str(workload.dtype).removeprefix("torch."),
        workload.op.value,
        algorithm,
        timings.of(_OWN) * 1e6,
        totals[_OWN],
        timings.rounds,
        {
            name: Against(timings.of(name).median * 1e6, timings.ratio(name, _OWN), totals[name])
            for name in settings.against
        },
    )


def _chosen(own: Peer, workload: Workload, slot: Slot, rank: int) -> str:
    """Return the algorithm that unisono chooses for a workload."""
    assert isinstance(own, UnisonoPeer)
    workload.fill(slot, rank)
    algorithm = own.chosen(own.bind(workload, slot))
    workload.fill(slot, rank)
    return algorithm
