"""Measurement of what messages cost, by calls of a few algorithms and sizes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from unisono.collectives.algorithms import serving
from unisono.collectives.tuning.cost_table import CostTable
from unisono.collectives.tuning.fit import Cell, Fit, fit
from unisono.comm.tuner import Tuner
from unisono.host.cpu_count import cores

__all__ = ["measured_table"]

_SIZES = (64, 64 << 10, 512 << 10, 4 << 10)
"""The first two are always measured: one size cannot separate bytes from latency."""
_ALGORITHMS = ("recursive_doubling", "ring", "two_shot", "one_shot", "chunked_ring:segments=8")
_CALLS = 4
"""Calls per sample: a call overlaps with the next one, as in a program."""


def measured_table(comm: Any, tuner: Tuner, device: str, seconds: float) -> CostTable:
    """Return the table that all ranks of a communicator use from now on. Collective.

    Args:
        comm: The communicator.
        tuner: Its table of costs.
        device: Device of the tensors.
        seconds: Time for all of it, at most about this.
    """
    if comm.size == 1:
        return tuner.machine().table
    if len(set(tuner.hosts)) == 1:
        inside = between = _fitted(comm, device, seconds, cores())
    else:
        first = tuner.hosts.index(tuner.hosts[comm.rank])
        with comm.split(first) as host:
            inside = _fitted(host, device, seconds / 2, cores())
        leaders, between = comm.split(0 if first == comm.rank else None), None
        if leaders is not None:
            with leaders:
                between = _fitted(leaders, device, seconds / 2, 0)
    if between is None:
        return tuner.adopt(None)
    near = inside or between
    return tuner.adopt(CostTable(near.link, between.link, near.gamma, near.overhead, cores=cores()))


def _fitted(comm: Any, device: str, seconds: float, cores: int) -> Fit | None:
    """Return the constants that fit the calls of a communicator; None except on rank 0, and if there is no other.

    Its ranks share the cores; 0 if each is on a host of its own.
    """
    cells = _measured(comm, device, seconds) if comm.size > 1 else []
    return fit(cells, cores) if cells and comm.rank == 0 else None


def _measured(comm: Any, device: str, seconds: float) -> list[Cell]:
    end = time.monotonic() + 0.9 * seconds
    cells = list[Cell]()
    known = serving("all_reduce", comm.size)
    names = [name for name in _ALGORITHMS if name.partition(":")[0] in known]
    for place, nbytes in enumerate(_SIZES):
        tensor = torch.zeros(nbytes // 4, device=device)
        calls: dict[tuple[str, str], Callable[[], object]] = {
            ("all_reduce", name): partial(comm.all_reduce, tensor, algorithm=name) for name in names
        }
        calls["broadcast", "binomial"] = partial(comm.broadcast, tensor, 0, algorithm="binomial")
        begin = time.monotonic()
        for call in calls.values():
            call()
        now = time.monotonic()
        # Rank 0 decides for all how many samples there is time for.
        share = (end - now) / (len(_SIZES) - place)
        rounds = torch.tensor([max(0, min(20, int(share / (_CALLS * (now - begin)))))], device=device)
        comm.broadcast(rounds, 0)
        if not int(rounds) and place > 1:
            break
        samples: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
        for _ in range(max(1, int(rounds))):
            for key, call in calls.items():
                comm.barrier()
                begin = time.monotonic()
                for _ in range(_CALLS):
                    call()
                samples[key].append((time.monotonic() - begin) / _CALLS)
        cells += [Cell(*key, comm.size, nbytes, median(taken)) for key, taken in samples.items()]
    return cells
