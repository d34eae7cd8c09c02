"""Every way to start and to meet that torch has: the default group is on unisono, and works."""

from __future__ import annotations

import os
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing
from torch_ranks import reserved_ports

import unisono as un
import unisono.interop
from unisono.interop import GroupOptions

WITHIN = timedelta(seconds=20)
BACKENDS = ("unisono", "cpu:unisono", "cpu:unisono,cuda:nccl")
WAYS = ("env", "env://", "tcp://", "file://", "TCPStore", "FileStore", "PrefixStore")


def meet(way: str, backend: str, rank: int, size: int, folder: Path, port: int) -> None:
    """Make the default group as a program would."""
    who: dict[str, Any] = {"rank": rank, "world_size": size}
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    file = str(folder / f"{port}")
    where: dict[str, Any]
    if way == "env":
        where, who = {}, {}
    elif way == "env://":
        where = {"init_method": way}
    elif way == "tcp://":
        where = {"init_method": f"{way}127.0.0.1:{port}"}
    elif way == "file://":
        where = {"init_method": f"{way}{file}"}
    elif way == "TCPStore":
        where = {"store": dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0)}
    elif way == "FileStore":
        where = {"store": dist.FileStore(file, size)}
    else:
        where = {"store": dist.PrefixStore("a job", dist.FileStore(file, size))}
    dist.init_process_group(backend, **where, **who, timeout=WITHIN)


def used() -> list[Any]:
    """Use the default group: a collective, a message, objects, a subgroup."""
    rank, size = dist.get_rank(), dist.get_world_size()
    t, got = torch.tensor([10.0**rank]), torch.empty(1)
    dist.all_reduce(t)
    works = [dist.isend(torch.tensor([1.0 * rank]), (rank + 1) % size), dist.irecv(got, (rank - 1) % size)]
    for work in works:
        work.wait()
    everybody: list[Any] = [None] * size
    dist.all_gather_object(everybody, rank)
    inner, ends = torch.ones(1), dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        dist.all_reduce(inner, group=ends)
    return [dist.get_backend(), t.item(), got.item(), everybody, inner.item()]


def try_all(rank: int, size: int, folder: Path, ports: list[int]) -> list[list[Any]]:
    found = []
    for way, backend, port in zip(WAYS, backends(), ports, strict=True):
        meet(way, backend, rank, size, folder, port)
        found.append(used())
        dist.destroy_process_group()
    return found


def expected(rank: int, size: int) -> list[list[Any]]:
    total = sum(10.0**r for r in range(size))
    inner = 2.0 if rank in (0, size - 1) else 1.0
    return [[backend, total, float((rank - 1) % size), list(range(size)), inner] for backend in backends()]


def backends() -> list[str]:
    """The one for each way."""
    return [backend for backend, _ in zip(cycle(BACKENDS), WAYS, strict=False)]


def spawned(rank: int, size: int, folder: Path, ports: list[int]) -> None:
    assert unisono.interop.register is not None
    torch.set_num_threads(1)
    torch.save(try_all(rank, size, folder, ports), folder / f"found by {rank}")


def launched(comm: un.Communicator, folder: Path, ports: list[int]) -> list[list[Any]]:
    return try_all(comm.rank, comm.size, folder, ports)


@pytest.mark.soak
def test_torch_multiprocessing(tmp_path: Path) -> None:
    with reserved_ports(len(WAYS)) as ports:
        multiprocessing.spawn(spawned, (2, tmp_path, ports), nprocs=2)
    for rank in range(2):
        assert torch.load(tmp_path / f"found by {rank}") == expected(rank, 2)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.soak), 4])
def test_launch_processes(tmp_path: Path, size: int) -> None:
    with reserved_ports(len(WAYS)) as ports:
        found = un.launch(launched, size, "shm", (tmp_path, ports), timeout=20)
    assert found == [expected(rank, size) for rank in range(size)]


def ends_without_waiting(rank: int, size: int, file: str) -> None:
    torch.set_num_threads(1)
    options = GroupOptions("gloo")
    dist.init_process_group("unisono", init_method=file, rank=rank, world_size=size, pg_options=options)
    for _ in range(20):
        dist.all_reduce(torch.ones(100_000), async_op=True)


@pytest.mark.soak
def test_process_may_end_before_its_collectives(tmp_path: Path) -> None:
    """A thread that came back from gloo after the interpreter's end would end the process by SIGABRT."""
    started = multiprocessing.spawn(ends_without_waiting, (3, f"file://{tmp_path}/store"), nprocs=3, join=False)
    while not started.join():
        pass
    assert [process.exitcode for process in started.processes] == [0, 0, 0]
