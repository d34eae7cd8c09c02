"""Backend shm+tcp: collectives in one native call, over rings inside hosts and sockets between hosts."""

from __future__ import annotations

import pytest
import torch
from insides import transport_of

import unisono as un
from unisono.testing import run_ranks

Hosts = tuple[tuple[int, ...], ...]
HOSTS: list[Hosts] = [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((3, 0), (1,), (2, 4))]


def results(comm: un.Communicator, count: int) -> list[torch.Tensor]:
    """Return the results of all collectives. Values are whole numbers, so the order of additions does not matter."""
    rank = comm.rank
    size = comm.size
    mine = torch.arange(count, dtype=torch.float32) % 13 * (rank + 1)
    total = mine.clone()
    comm.all_reduce(total)
    found = [total]
    for root in range(size):
        comm.broadcast(sent := mine.clone(), root)
        comm.reduce(reduced := mine.clone(), root)
        found += [sent, reduced if rank == root else total]
    comm.all_gather_single(gathered := torch.empty(size * count), mine)
    comm.reduce_scatter_single(part := torch.empty(count), gathered)
    comm.all_to_all_single(exchanged := torch.empty(size * count), gathered + rank)
    comm.gather(mine, rows := [torch.empty(count) for _ in range(size)] if rank == 1 else None, 1)
    uneven = comm.gather_v(mine[: 1 + rank % count], 2)
    comm.barrier()
    return [*found, gathered, part, exchanged, *(rows or []), *(uneven or [])]


def expected(rank: int, size: int, count: int) -> list[torch.Tensor]:
    rows = [torch.arange(count, dtype=torch.float32) % 13 * (other + 1) for other in range(size)]
    total = torch.stack(rows).sum(0)
    found = [total]
    for root in range(size):
        found += [rows[root], total]
    exchanged = torch.cat([rows[rank] + other for other in range(size)])
    uneven = [row[: 1 + other % count] for other, row in enumerate(rows)]
    at_root = {1: rows, 2: uneven}
    return [*found, torch.cat(rows), rows[rank] * size, exchanged, *at_root.get(rank, [])]


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_every_collective_on_any_hosts(hosts: Hosts) -> None:
    size = sum(map(len, hosts))

    def program(comm: un.Communicator) -> list[list[torch.Tensor]]:
        # Short calls, calls of one slice, and calls of several slices.
        return [results(comm, count) for count in (3, 20_000, 300_000)]

    for rank, found in enumerate(run_ranks(program, size, "shm+tcp", hosts=hosts)):
        for count, tensors in zip((3, 20_000, 300_000), found, strict=True):
            for tensor, wanted in zip(tensors, expected(rank, size, count), strict=True):
                assert torch.equal(tensor, wanted), (rank, count)


def test_subgroups_use_what_suffices() -> None:
    def program(comm: un.Communicator) -> list[tuple[str, float]]:
        found = []
        for color in (comm.rank % 2, comm.rank // 2, comm.rank < 3):
            part = comm.split(color)
            part.all_reduce(ones := torch.ones(5))
            found.append((type(transport_of(part)).__name__, ones[0].item()))
        return found

    found = run_ranks(program, 4, "shm+tcp", hosts=[[0, 1], [2, 3]])
    assert found[0] == [("TcpTransport", 2.0), ("ShmTransport", 2.0), ("Paired", 3.0)]


def test_all_ranks_get_the_same_bits() -> None:
    def program(comm: un.Communicator) -> list[bytes]:
        found = []
        for count in (100, 100_000):
            values = torch.rand(count, generator=torch.Generator().manual_seed(comm.rank))
            comm.all_reduce(values)
            found.append(values.numpy().tobytes())
        return found

    for hosts in HOSTS:
        found = run_ranks(program, sum(map(len, hosts)), "shm+tcp", hosts=hosts)
        assert all(other == found[0] for other in found)
