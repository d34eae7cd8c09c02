"""Ranks that run a program written for torch's RPC."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import unisono as un
import unisono.interop.torch_rpc as rpc

__all__ = ["Program", "echo", "of"]

Program = Callable[[], Any]


def echo(value: Any) -> Any:
    return value


def _inside(comm: un.Communicator, program: Program, path: str) -> Any:
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, rpc_timeout=20, init_method=f"file://{path}")
    rpc.init_rpc(f"worker{comm.rank}", rank=comm.rank, world_size=comm.size, rpc_backend_options=options)
    found = program() if comm.rank == 0 else None
    rpc.shutdown()
    with pytest.raises(RuntimeError):
        rpc.rpc_sync("worker0", echo, args=(1,))
    return found


def of(program: Program, folder: Path, size: int = 2) -> Any:
    return un.launch(_inside, size, "shm", (program, str(folder / "store")), timeout=30)[0]
