"""Devices of the GPU tests: GPUs, or the fake device, for `make gpu`, and once the CPU in every suite."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch

import unisono as un
from unisono.host.mpi_library import find_mpirun
from unisono.testing import pool

__all__ = ["ALL", "BACKWARD", "CPU", "GPU", "NCCL", "PAIRS", "THREAD", "TIMEOUT_S", "Place", "listed", "share_gpus"]

_found = torch.accelerator.current_accelerator()
GPU = "cuda" if _found is None else _found.type
"""The fake device, where it is loaded: `import torch` does that."""

TIMEOUT_S = 30.0
"""Of one operation: the first one on a GPU makes a context, which takes seconds where ranks share the GPU."""


class Place(NamedTuple):
    """Ranks of a backend, and the kind of device that has their tensors."""

    backend: str
    size: int
    device: str

    def run(self, program: Callable[..., Any], *args: Any) -> list[Any]:
        """Each rank's `program(comm, *args)`."""

        def on_rank(comm: un.Communicator, *args: Any) -> Any:
            share_gpus(comm)
            return program(comm, *args)

        return pool(self.backend, self.size, timeout=TIMEOUT_S, device=self.device).run(on_rank, *args)


def share_gpus(comm: un.Communicator) -> None:
    """Let several ranks of nccl have one GPU: it refuses that inside a host, so each rank is one. Before any call."""
    if comm.backend == "nccl" and comm.size > torch.cuda.device_count():
        os.environ["NCCL_HOSTID"] = f"rank {comm.rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def listed(*places: Place, on_cpu: Sequence[pytest.MarkDecorator] = ()) -> list[Any]:
    """For `parametrize`; `on_cpu` are the marks of those on the CPU."""
    marks = {GPU: [pytest.mark.gpu], "cpu": on_cpu}
    return [pytest.param(place, id="-".join(map(str, place)), marks=marks[place.device]) for place in places]


CPU = Place("shm", 2, "cpu")
MPI = (Place("mpi", 2, GPU),) if find_spec("mpi4py") and find_mpirun() else ()
PAIRS = (Place("shm", 2, GPU), Place("gloo", 2, GPU), *MPI)
"""Two ranks, which share a GPU if there is only one."""
NCCL = tuple(Place("nccl", size, GPU) for size in sorted({1, 2, torch.cuda.device_count()}) if GPU == "cuda")
THREAD = Place("thread", 2, GPU)
ALL = listed(CPU, *PAIRS, THREAD, *NCCL)
BACKWARD = (*PAIRS, *((THREAD,) if torch.accelerator.device_count() > 1 else ()), *NCCL)
"""Places where hooks of backward passes may wait for other ranks."""
