"""Calls between ranks and a process group may meet at one address, in any order, as in torch."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch_ranks import reserved_ports

import unisono as un
import unisono.interop.torch_rpc as rpc
from unisono.testing import pool


def plus(value: int, more: int) -> int:
    return value + more


def program(comm: un.Communicator, path: str, port: int, method: str, order: str, backend: str) -> tuple[float, int]:
    where = {"env": "env://", "file": f"file://{path}", "tcp": f"tcp://127.0.0.1:{port}"}[method]
    here = {"rank": comm.rank, "world_size": comm.size}

    def group() -> None:
        dist.init_process_group(backend, init_method=where, **({} if method == "env" else here))

    def calls() -> None:
        options = rpc.TensorPipeRpcBackendOptions(init_method=where)
        rpc.init_rpc(f"worker{comm.rank}", rpc_backend_options=options, **({} if method == "env" else here))

    known = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": comm.rank, "WORLD_SIZE": comm.size}
    starts, ends = {"group": group, "calls": calls}, {"group": dist.destroy_process_group, "calls": rpc.shutdown}
    with patch.dict(os.environ, {name: str(value) for name, value in known.items()}):
        for name in order.split(", "):
            starts[name]()
    total = torch.ones(1)
    dist.all_reduce(total)
    answer = rpc.rpc_sync(f"worker{(comm.rank + 1) % comm.size}", plus, args=(1, comm.rank))
    for name in order.split(", "):
        ends[name]()
    return total.item(), answer


@pytest.mark.parametrize("backend", ["gloo", "unisono"])
@pytest.mark.parametrize("order", ["group, calls", "calls, group"])
@pytest.mark.parametrize("method", ["env", "tcp", "file"])
def test_group_and_rpc_share_an_address(method: str, order: str, backend: str, tmp_path: Path) -> None:
    with reserved_ports(1) as (port,):
        found = pool("shm", 2).run(program, str(tmp_path / "store"), port, method, order, backend)
    assert found == [(2.0, 1 + rank) for rank in range(2)]
