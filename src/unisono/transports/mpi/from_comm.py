"""A transport on an MPI communicator that the caller made and owns, with a control plane of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from unisono.bootstrap.mpi import find_on
from unisono.core.control import ControlPlane
from unisono.core.group import Group
from unisono.core.transport import Options
from unisono.diagnostics.tracebacks import show_errors
from unisono.host.mpi_library import library
from unisono.transports.mpi.communicators import CommHandle, MpiCommunicators
from unisono.transports.mpi.transport import MpiTransport

__all__ = ["adopt"]


def adopt(
    comm: Any, timeout_s: float, chunk_bytes: int
) -> tuple[MpiTransport, ControlPlane, Options, Callable[[], None]]:
    """Return the transport, control handle and options of this rank, and a function to call at the end.

    Messages travel on private communicators of the same ranks, so that they never match the owner's. Rank 0
    hosts the control plane, and broadcasts its address and secret over `comm`.

    Raises:
        TypeError: It is no communicator of mpi4py.
        ValueError: It is none of MPI's intracommunicators, or null.
    """
    mpi = library()
    show_errors(mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size())
    if not isinstance(comm, mpi.Comm):
        raise TypeError(f"comm must be a communicator of mpi4py, such as MPI.COMM_WORLD, not {type(comm).__name__}")
    if comm == mpi.COMM_NULL:
        raise ValueError("comm is MPI.COMM_NULL: this process is not in it; only its members call from_mpi")
    if comm.Is_inter():
        raise ValueError("comm is an intercommunicator; merge its two groups first: comm.Merge()")
    rank = comm.Get_rank()
    size = comm.Get_size()
    deadline = time.monotonic() + timeout_s
    base = CommHandle.dup(comm, deadline)
    rendezvous = find_on(base.comm, f"rank {rank} of {size} of an MPI communicator", deadline)
    try:
        options = Options("mpi", "cpu", timeout_s, rendezvous.address, chunk_bytes)
        comms = MpiCommunicators(base, range(size), rendezvous.name)
        transport = MpiTransport(Group.world(rank, size, rendezvous.name), comms, rendezvous.control, options)
    except BaseException:
        rendezvous.close()
        raise
    return transport, rendezvous.control, options, rendezvous.close
