"""Plain gloo from torch: a ProcessGroupGloo on the loopback device, without unisono."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from unisono.communicator import Communicator
from unisono.core.types import ReduceOp
from unisono.errors import UnavailableError
from unisono.tools.bench.peers import Peer
from unisono.tools.bench.workload import Slot, Workload
from unisono.transports.torch.process_groups import gloo_options

__all__ = ["PEER", "Gloo"]

_TIMEOUT = timedelta(seconds=120)
_REFUSED = (torch.int16, torch.bool)


class Gloo(Peer):
    """A single process group of all ranks, with two threads, as torch creates it by default.

    Attributes:
        device: Keyword arguments for gloo's `create_device`, which select the address to listen on.
        group: The ProcessGroupGloo, for operations that are not collectives.
    """

    device: ClassVar[dict[str, str]] = {"hostname": "127.0.0.1"}

    @classmethod
    def obstacle(cls, workload: Workload) -> str | None:
        if not dist.is_gloo_available():
            raise UnavailableError("this build of torch has no gloo; measure without it, or use another build of torch")
        if workload.what.reduces and (workload.dtype in _REFUSED or workload.dtype.is_complex):
            return f"gloo does not reduce {workload.dtype}; measure another dtype, or without gloo"
        return None

    def __init__(self, comm: Communicator, folder: Path) -> None:
        options = gloo_options(_TIMEOUT, dist.ProcessGroupGloo.create_device(**self.device))
        # Keep the store alive: the group uses it until it is destroyed.
        self._store = dist.FileStore(str(folder / "gloo"), comm.size)
        self.group: Any = dist.ProcessGroupGloo(self._store, comm.rank, comm.size, options)
        self._rank = comm.rank

    def bind(self, workload: Workload, slot: Slot) -> Callable[[], object]:
        start = _START[workload.collective](self.group, workload, slot, self._rank)
        return lambda: start().wait()

    def close(self) -> None:
        self.group.shutdown()


def _reduce_op(workload: Workload) -> Any:
    return dist.ReduceOp.AVG if workload.op is ReduceOp.AVG else getattr(dist.ReduceOp, workload.op.name)


def _all_reduce(group: Any, workload: Workload, slot: Slot, rank: int) -> Callable[[], Any]:
    options = dist.AllreduceOptions()
    options.reduceOp = _reduce_op(workload)
    return partial(group.allreduce, [slot.target], options)


def _reduce(group: Any, workload: Workload, slot: Slot, rank: int) -> Callable[[], Any]:
    options = dist.ReduceOptions()
    options.reduceOp = _reduce_op(workload)
    options.rootRank = 0
    return partial(group.reduce, [slot.target], options)


def _broadcast(group: Any, workload: Workload, slot: Slot, rank: int) -> Callable[[], Any]:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return partial(group.broadcast, [slot.target], options)


def _reduce_scatter(group: Any, workload: Workload, slot: Slot, rank: int) -> Callable[[], Any]:
    options = dist.ReduceScatterOptions()
    options.reduceOp = _reduce_op(workload)
    return partial(group._reduce_scatter_base, slot.target, slot.source, options)


def _gather(group: Any, workload: Workload, slot: Slot, rank: int) -> Callable[[], Any]:
    options = dist.GatherOptions()
    options.rootRank = 0
    outputs = [list(slot.target.split(workload.count))] if rank == 0 else []
    return partial(group.gather, outputs, [slot.source], options)


def _scatter(group: Any, workload: Workload, slot: Slot, rank: int) -> Callable[[], Any]:
    options = dist.ScatterOptions()
    options.rootRank = 0
    inputs = [list(slot.source.split(workload.count))] if rank == 0 else []
    return partial(group.scatter, [slot.target], inputs, options)


_START: dict[str, Callable[[Any, Workload, Slot, int], Callable[[], Any]]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": lambda group, workload, slot, rank: partial(group._allgather_base, slot.target, slot.source),
    "reduce_scatter": _reduce_scatter,
    "all_to_all": lambda group, workload, slot, rank: partial(group.alltoall_base, slot.target, slot.source, [], []),
    "gather": _gather,
    "scatter": _scatter,
    "barrier": lambda group, workload, slot, rank: group.barrier,
}

PEER = Gloo
