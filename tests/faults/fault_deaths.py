"""Ranks that leave, fail, are ended, or are stopped."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from fault_rows import DEATH_S, LATE_S, LONG_S, ODD, SHORT_S, SIZE, fault, odd
from insides import control_of, cut

from unisono.errors import AbortedError, CommTimeoutError, PeerLostError


@fault("an early exit", PeerLostError, within_s=DEATH_S, odd_counts=False)
def _(comm: Any) -> None:
    if odd(comm):
        comm.close()
        raise PeerLostError("rank 1 left", rank=1, size=SIZE, operation="close", call=1, group="-")
    comm.all_reduce(torch.ones(4), timeout=LONG_S)


@fault("an exception in one rank", PeerLostError, KeyError, PeerLostError, within_s=DEATH_S)
def _(comm: Any) -> None:
    with comm:
        if odd(comm):
            raise KeyError("weights.pt")
        comm.all_reduce(torch.ones(4), timeout=LONG_S)


@fault("an exception in one rank, others in messages", PeerLostError, KeyError, PeerLostError, within_s=DEATH_S)
def _(comm: Any) -> None:
    with comm:
        if odd(comm):
            raise KeyError("weights.pt")
        comm.recv(torch.ones(4), ODD, timeout=LONG_S)


@fault("a wrong argument on one rank", PeerLostError, ValueError, PeerLostError, within_s=DEATH_S)
def _(comm: Any) -> None:
    with comm:
        comm.all_reduce(torch.ones(4), "no such thing" if odd(comm) else "sum", timeout=LONG_S)


@fault("abort", AbortedError, within_s=DEATH_S)
def _(comm: Any) -> None:
    if odd(comm):
        comm.abort("enough")
    comm.all_reduce(torch.ones(4), timeout=LONG_S)


@fault(
    "a control connection that is cut",
    PeerLostError,
    within_s=DEATH_S,
    fatal=True,
    gone=frozenset({ODD}),
    impossible={
        "thread": "threads have no connection",
    },
)
def _(comm: Any) -> None:
    comm.barrier()
    if odd(comm):
        cut(control_of(comm))
    # In shared memory many calls complete before the death is reported.
    while True:
        comm.all_reduce(torch.ones(4), timeout=LONG_S)


NO_PROCESS = {"thread": "a thread cannot be ended from outside: the signal would end all ranks"}


def _ended(comm: Any, how: Callable[[], object]) -> None:
    comm.barrier()
    if odd(comm):
        how()
    comm.all_reduce(torch.ones(4), timeout=LONG_S)
    comm.all_reduce(torch.ones(4), timeout=LONG_S)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


_DEATH: dict[str, Any] = {"within_s": DEATH_S, "fatal": True, "gone": frozenset({ODD}), "impossible": NO_PROCESS}


@fault("SIGKILL between calls", PeerLostError, **_DEATH)
def _(comm: Any) -> None:
    _ended(comm, _kill)


@fault("SIGKILL in a collective", PeerLostError, **_DEATH)
def _(comm: Any) -> None:
    comm.barrier()
    if odd(comm):
        threading.Timer(0.1, _kill).start()
        comm.recv(torch.ones(4), 0)
    comm.all_reduce(torch.ones(1 << 16), timeout=LONG_S)


@fault("SIGKILL in a message", PeerLostError, **_DEATH)
def _(comm: Any) -> None:
    comm.barrier()
    if odd(comm):
        threading.Timer(0.1, _kill).start()
    comm.recv(torch.ones(4), 2 if odd(comm) else ODD, timeout=LONG_S)


@fault("SIGTERM", PeerLostError, **_DEATH)
def _(comm: Any) -> None:
    _ended(comm, lambda: os.kill(os.getpid(), signal.SIGTERM))


@fault("SIGSEGV", PeerLostError, **_DEATH)
def _(comm: Any) -> None:
    _ended(comm, lambda: os.kill(os.getpid(), signal.SIGSEGV))


@fault("os._exit", PeerLostError, **_DEATH)
def _(comm: Any) -> None:
    _ended(comm, lambda: os._exit(3))


@fault("sys.exit", PeerLostError, SystemExit, PeerLostError, within_s=DEATH_S)
def _(comm: Any) -> None:
    with comm:
        if odd(comm):
            sys.exit(3)
        comm.all_reduce(torch.ones(4), timeout=LONG_S)


@fault("SIGSTOP", CommTimeoutError, within_s=SHORT_S + LATE_S, odd_counts=False, impossible=NO_PROCESS)
def _(comm: Any) -> None:
    pids = comm.all_gather_object(os.getpid())
    comm.barrier()
    if odd(comm):
        os.kill(os.getpid(), signal.SIGSTOP)
        comm.barrier(timeout=LONG_S)
    try:
        comm.all_reduce(torch.ones(4), timeout=SHORT_S)
    finally:
        comm.stopped = pids[ODD]


@fault(
    "SIGSTOP, others in messages", CommTimeoutError, within_s=SHORT_S + LATE_S, odd_counts=False, impossible=NO_PROCESS
)
def _(comm: Any) -> None:
    pids = comm.all_gather_object(os.getpid())
    comm.barrier()
    if odd(comm):
        os.kill(os.getpid(), signal.SIGSTOP)
        comm.barrier(timeout=LONG_S)
    try:
        comm.recv(torch.ones(4), ODD, timeout=SHORT_S)
    finally:
        comm.stopped = pids[ODD]


_UNENDING = {
    "mpi": "Open MPI may not return from the call, and then this rank, or the job, is ended: see the last rows"
}


@fault(
    "SIGSTOP in a collective",
    CommTimeoutError,
    within_s=SHORT_S + LATE_S,
    odd_counts=False,
    impossible=NO_PROCESS | _UNENDING,
)
def _(comm: Any) -> None:
    pids = comm.all_gather_object(os.getpid())
    comm.barrier()
    if odd(comm):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    try:
        while True:
            comm.came_s = time.monotonic()
            comm.all_reduce(torch.ones(1 << 18), timeout=SHORT_S)
    finally:
        comm.stopped = pids[ODD]
