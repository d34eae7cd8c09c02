"""`un.init()` and torch's `init_process_group` in one process, both by the variables of `env://`."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

Start = Callable[..., "subprocess.Popen[str]"]

BOTH = """
import os, sys, torch, torch.distributed as dist, unisono as un
from datetime import timedelta

def theirs():
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))

def ours():
    return un.init("gloo", timeout=40)

for order, port in (("torch first", os.environ["MASTER_PORT"]), ("torch second", sys.argv[1])):
    os.environ["MASTER_PORT"] = port
    if order == "torch first":
        theirs()
    comm = ours()
    if order == "torch second":
        theirs()
    second = ours()
    sums = [torch.ones(2), torch.ones(2), torch.ones(2)]
    comm.all_reduce(sums[0])
    dist.all_reduce(sums[1])
    second.all_reduce(sums[2])
    comm.barrier()
    print(order, [x.tolist() for x in sums])
    second.close()
    comm.close()
    dist.destroy_process_group()
"""


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def printed(start: Start, program: str, given: str, size: int, port: int) -> list[str]:
    started = [start([sys.executable, "-c", program, given], environment(r, size, port)) for r in reversed(range(size))]
    said = ["".join(process.communicate(timeout=60)) for process in started]
    # Torch 2.8 tells of each connection.
    return ["".join(line for line in lines.splitlines(True) if not line.startswith("[Gloo]")) for lines in said]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_both_meet_at_one_port(start: Start, ports: Iterator[int], size: int) -> None:
    sums = [[float(size)] * 2] * 3
    # Each order has a port of its own: torch's store of the first may still be at that one.
    assert (
        printed(start, BOTH, str(next(ports)), size, next(ports))
        == [f"torch first {sums}\ntorch second {sums}\n"] * size
    )


TWICE = """
import torch, unisono as un
for round in range(3):
    with un.init("shm", timeout=40) as comm:
        x = torch.ones(1)
        comm.all_reduce(x)
print(x.item())
"""


def test_the_next_init_meets_at_its_own_address(start: Start, port: int) -> None:
    assert printed(start, TWICE, "", 2, port) == ["2.0\n"] * 2


ONE = "import sys, unisono as un; print(un.init('gloo', timeout=float(sys.argv[1])).size)"


def test_forged_address_is_not_believed(start: Start, port: int) -> None:
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
        place = f"unisono/ at 127.0.0.1:{port}/rank 0"
        store.set(place, f"127.0.0.1 {trap.getsockname()[1]}")
        found = start([sys.executable, "-c", ONE, "3"], environment(1, 2, port))
        _, said = found.communicate(timeout=60)
        listening.join()
    assert "was published" in said or "rank 0 was not reached in time at the address" in said
    assert all(b"unisono-secret" not in content for content in seen)


def test_port_of_another_program_is_told_at_once(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        started = time.monotonic()
        process: Any = start([sys.executable, "-c", ONE, "50"], environment(0, 2, other.getsockname()[1]))
        _, said = process.communicate(timeout=60)
    assert "is taken by another program" in said
    assert time.monotonic() - started < 40
