"""Ranks that do not come, or that wait for each other."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from fault_rows import LATE_S, LONG_S, ODD, SHORT_S, fault, odd
from insides import control_of, engine_of

from unisono.errors import CommTimeoutError, DeadlockError


@fault("a rank that arrives too late", CommTimeoutError, within_s=SHORT_S + LATE_S)
def _(comm: Any) -> None:
    if odd(comm):
        _until_broken(comm)
    comm.all_reduce(torch.ones(4), timeout=SHORT_S)


@fault("a rank that is busy elsewhere, for a monitored_barrier", CommTimeoutError, within_s=SHORT_S + LATE_S)
def _(comm: Any) -> None:
    if odd(comm):
        _until_broken(comm)
    comm.monitored_barrier(timeout=SHORT_S)


@fault("a rank that waits for its own lock", CommTimeoutError, within_s=SHORT_S + LATE_S)
def _(comm: Any) -> None:
    if odd(comm):
        threading.Lock().acquire()
        _until_broken(comm)
    comm.barrier(timeout=SHORT_S)


@fault("a receive without a send", CommTimeoutError, within_s=SHORT_S + LATE_S)
def _(comm: Any) -> None:
    if comm.rank == 0:
        comm.recv(torch.ones(4), ODD, timeout=SHORT_S)
    _until_broken(comm)
    comm.barrier()


@fault("a receive whose tag is never sent", CommTimeoutError, within_s=SHORT_S + LATE_S)
def _(comm: Any) -> None:
    if odd(comm):
        comm.isend(torch.ones(4), 0, tag=1)
    if comm.rank == 0:
        comm.recv(torch.ones(4), ODD, tag=2, timeout=SHORT_S)
    _until_broken(comm)
    comm.barrier()


@fault(
    "sends that face each other",
    DeadlockError,
    within_s=SHORT_S + LATE_S,
    impossible={
        "shm": "ring buffers of 128 KiB hold short messages; see the next row",
        "tcp": "short messages are buffered; see the next row",
        "gloo": "short messages are buffered; see the next row",
        "mpi": "short messages are buffered; see the next row",
    },
)
def _(comm: Any) -> None:
    if comm.rank < 2:
        comm.send(torch.ones(4), 1 - comm.rank, timeout=SHORT_S)
    comm.barrier(timeout=LONG_S)


@fault("receives that face each other", DeadlockError, within_s=SHORT_S + LATE_S)
def _(comm: Any) -> None:
    if comm.rank < 2:
        comm.recv(torch.ones(4), 1 - comm.rank, timeout=SHORT_S)
    comm.barrier(timeout=LONG_S)


# A `DeadlockError` where the circle was proved before one of its waits ended.
@fault("two groups, interleaved", CommTimeoutError, or_kind=DeadlockError, within_s=SHORT_S + LATE_S, breaks=False)
def _(comm: Any) -> None:
    one, two = comm.dup(), comm.dup()
    first, second = (two, one) if odd(comm) else (one, two)
    first.barrier(timeout=SHORT_S)
    second.barrier(timeout=SHORT_S)


def _until_broken(comm: Any) -> None:
    """Do something else until the group has failed."""
    deadline = time.monotonic() + LONG_S
    while control_of(comm).first_cause(engine_of(comm).group, 0.05) is None:
        assert time.monotonic() < deadline, "the group never failed"
