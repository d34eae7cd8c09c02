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
    """A single process group of all ranks, with two threads, which is torch's default.

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
        # Keep the store alive, because the process group uses it until the group is destroyed.
        self._store = dist.FileStore(str(folder / "gloo"), comm.size)
        self.group: Any = dist.ProcessGroupGloo(self._store, comm.rank, comm.size, options)
        self._rank = comm.rank

    def bind(self, workload: Workload, slot: Slot) -> Callable[[], object]:
        start = _START[workload.collective](self.group, workload, slot, self._rank)
        return lambda: start().wait()

    def close(self) -> None:
        self.group.shutdown()


def _reducing(options: Any, workload: Workload) -> Any:
    """Set the workload's reduction operation in torch's `options`, and return them."""
    options.reduceOp = dist.ReduceOp.AVG if workload.op is ReduceOp.AVG else getattr(dist.ReduceOp, workload.op.name)
    return options


# Don't pass a root: torch's default is rank 0, as in every workload.
_START: dict[str, Callable[[Any, Workload, Slot, int], Callable[[], Any]]] = {
    "all_reduce": lambda group, workload, slot, rank: partial(
        group.allreduce, [slot.target], _reducing(dist.AllreduceOptions(), workload)
    ),
    "reduce": lambda group, workload, slot, rank: partial(
        group.reduce, [slot.target], _reducing(dist.ReduceOptions(), workload)
    ),
    "broadcast": lambda group, workload, slot, rank: partial(group.broadcast, [slot.target]),
    "all_gather": lambda group, workload, slot, rank: partial(group._allgather_base, slot.target, slot.source),
    "reduce_scatter": lambda group, workload, slot, rank: partial(
        group._reduce_scatter_base, slot.target, slot.source, _reducing(dist.ReduceScatterOptions(), workload)
    ),
    "all_to_all": lambda group, workload, slot, rank: partial(group.alltoall_base, slot.target, slot.source, [], []),
    "gather": lambda group, workload, slot, rank: partial(
        group.gather, [list(slot.target.split(workload.count))] if rank == 0 else [], [slot.source]
    ),
    "scatter": lambda group, workload, slot, rank: partial(
        group.scatter, [slot.target], [list(slot.source.split(workload.count))] if rank == 0 else []
    ),
    "barrier": lambda group, workload, slot, rank: group.barrier,
}

PEER = Gloo
