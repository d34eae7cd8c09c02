"""`un.init()` and torch's `init_process_group` in one process, both by the variables of `env://`."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_helpers import new_pool
from waiting import wait_until

import unisono as un
from unisono.bootstrap import tcp_store

Task = Callable[..., Any]


def on_ranks(task: Task, size: int, port: int, *given: Any) -> list[Any]:
    """Return what it returns in each of as many processes, which are described by variables."""
    with new_pool(size) as workers:
        futures = [workers.submit(as_rank, variables(rank, size, port), task, *given) for rank in reversed(range(size))]
        return [future.result(60) for future in futures]


def error_of(rank: int, port: int, timeout: float) -> str:
    """The error of one process of two."""
    with new_pool(1) as workers:
        return str(workers.submit(as_rank, variables(rank, 2, port), un.init, "gloo", timeout=timeout).exception(60))


def variables(rank: int, size: int, port: int) -> dict[str, str]:
    place = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**os.environ, **place}


def as_rank(environment: dict[str, str], task: Task, *given: Any, **options: Any) -> Any:
    # The server that forked this process was started in some other test's environment.
    os.environ.clear()
    os.environ.update(environment)
    return task(*given, **options)


def both(second_port: int) -> dict[str, list[list[float]]]:
    found = {}
    for order, port in (("torch first", os.environ["MASTER_PORT"]), ("torch second", str(second_port))):
        os.environ["MASTER_PORT"] = port
        if order == "torch first":
            dist.init_process_group("gloo", timeout=timedelta(seconds=40))
        comm = un.init("gloo", timeout=40)
        if order == "torch second":
            dist.init_process_group("gloo", timeout=timedelta(seconds=40))
        second = un.init("gloo", timeout=40)
        sums = [torch.ones(2), torch.ones(2), torch.ones(2)]
        comm.all_reduce(sums[0])
        dist.all_reduce(sums[1])
        second.all_reduce(sums[2])
        comm.barrier()
        found[order] = [x.tolist() for x in sums]
        second.close()
        comm.close()
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_both_meet_at_one_port(ports: Iterator[int], size: int) -> None:
    sums = [[float(size)] * 2] * 3
    # Each order has a port of its own: torch's store of the first may still be at that one.
    assert on_ranks(both, size, next(ports), next(ports)) == [{"torch first": sums, "torch second": sums}] * size


def thrice() -> float:
    for _ in range(3):
        with un.init("shm", timeout=40) as comm:
            x = torch.ones(1)
            comm.all_reduce(x)
    return x.item()


def test_the_next_init_meets_at_its_own_address(port: int) -> None:
    assert on_ranks(thrice, 3, port) == [3.0] * 3


def dies_while_others_gather() -> None:
    """Be rank 0 until another rank has joined, and is in the middle of the meeting."""

    def killed(claim: Any, address: Any, secret: bytes, lease: Any) -> None:
        assert wait_until(lambda: lease.server._state._registrations, 40)
        os.kill(os.getpid(), signal.SIGKILL)

    vars(tcp_store)["meet"] = killed
    un.init("gloo", timeout=40)


def summed() -> float:
    with un.init("gloo", timeout=40) as comm:
        x = torch.ones(1)
        comm.all_reduce(x)
        return x.item()


def test_rank_0_is_killed_while_others_gather_and_comes_again(port: int) -> None:
    with new_pool(1) as other, new_pool(1) as first, new_pool(1) as second:
        waiting = other.submit(as_rank, variables(1, 2, port), summed)
        with pytest.raises(BrokenExecutor):
            first.submit(as_rank, variables(0, 2, port), dies_while_others_gather).result(60)
        assert second.submit(as_rank, variables(0, 2, port), summed).result(60) == 2.0
        assert waiting.result(60) == 2.0


@pytest.mark.soak
def test_rank_0_is_killed_while_others_gather_and_does_not_come_again(port: int) -> None:
    with new_pool(1) as other, new_pool(1) as first:
        waiting = other.submit(as_rank, variables(1, 2, port), un.init, "gloo", timeout=15)
        with pytest.raises(BrokenExecutor):
            first.submit(as_rank, variables(0, 2, port), dies_while_others_gather).result(60)
        said = str(waiting.exception(60))
    assert "rank 0 was not reached in time at the address published through the store" in said
    assert "was lost" in said
    assert "recv" not in said


def test_forged_address_is_not_believed(port: int) -> None:
    """Any process may write into the store: the peer at the address has to know the secret."""
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(30)

        def listen() -> None:
            peer, _ = trap.accept()
            with peer:
                peer.sendall(b"unisono" * 20)
                seen.append(peer.recv(1 << 16))

        listening = threading.Thread(target=listen)
        listening.start()
        here = "127.0.0.1", port
        store = dist.TCPStore(*here, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
        place = f"unisono/ at {port}/rank 0"
        store.set(place, f"127.0.0.1 {trap.getsockname()[1]}")
        said = error_of(1, port, 2)
        listening.join()
    assert "was published" in said or "rank 0 was not reached in time at the address" in said
    assert all(b"unisono-secret" not in content for content in seen)


def test_port_of_another_program_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        started = time.monotonic()
        said = error_of(0, other.getsockname()[1], 50)
    assert "is taken by another program" in said
    assert time.monotonic() - started < 40
