"""Ranks that start in any order, are killed while they meet and started again, and know a host by many names."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import subprocess
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono as un
from unisono.testing.namespaced_ranks import Network, enter, obstacle

pytestmark = pytest.mark.soak

STARTS = int(os.environ.get("UNISONO_STARTS", "300"))
TIMEOUT_S = 900.0
WITHIN_S = 300.0
"""What a meeting may take, on a machine so busy that one of four ranks took 40 s; one that waits for the timeout takes
longer on any."""
NAMES = (
    ["127.0.1.1 first", "10.77.0.1 second", "fd77::1 third", "10.77.0.1 fourth"],
    ["10.77.0.1 first", "fd77::1 second", "10.77.0.1 third", "fd77::9 fourth", "10.77.0.1 fourth"],
)
"""What hosts 0 and 1 know. fd77::9 answers nothing."""
ADDRESS = "10.77.0.1"
ALL = [ADDRESS, "first", "second", "third", "fourth"]
SAME = [ADDRESS, "second", "fourth"], [ADDRESS, "first", "third", "fourth"]
"""What leads to that address, on each host."""
_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000
_CONTEXT = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    reason = obstacle()
    if reason is not None:
        pytest.skip(reason)
    with Network(2) as made:
        yield made


def ip(network: Network, host: int, *words: str) -> None:
    subprocess.run(["ip", "-n", network.name(host), *words], check=True)


def live(namespace: str, hosts: str, place: dict[str, str], method: str, backend: str) -> None:
    """Be a rank on a host with these names, and exit with status 0 if the sum is right."""
    enter(namespace)
    libc = ctypes.CDLL(None, use_errno=True)
    for refused in (
        libc.unshare(_CLONE_NEWNS),
        libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None),
        libc.mount(hosts.encode(), b"/etc/hosts", None, _MS_BIND, None),
    ):
        assert not refused, os.strerror(ctypes.get_errno())
    torch.set_num_threads(1)
    rank, size = int(place["RANK"]), int(place["WORLD_SIZE"])
    given: dict[str, Any] = {}
    if method == "tcp":
        given = {
            "init_method": f"tcp://{place['MASTER_ADDR']}:{place['MASTER_PORT']}",
            "rank": rank,
            "world_size": size,
        }
    else:
        os.environ.update(place)
        if method == "private":
            os.environ["UNISONO_PORT"] = str(int(place["MASTER_PORT"]) + 1)
    with un.init(backend, timeout=TIMEOUT_S, **given) as comm:
        total = torch.ones(3)
        comm.all_reduce(total)
        assert total.tolist() == [float(size)] * 3


class Job:
    """The ranks of one job."""

    def __init__(self, network: Network, folder: Path, draw: random.Random, port: int) -> None:
        self.draw = draw
        self.size = draw.randint(2, 4)
        self.method = draw.choice(["env", "tcp", "private"])
        self.backend = draw.choice(["auto", "tcp", "gloo"])
        self.hosts = [0, *(draw.randrange(2) for _ in range(self.size - 1))]
        # The first rank listens at its address alone, but for a name at all that its host has.
        first = draw.choice(ALL)
        known = SAME if first == ADDRESS else (ALL, ALL)
        self.masters = [first, *(draw.choice(known[host]) for host in self.hosts[1:])]
        self.port = port
        self.network = network
        self.folder = folder
        self.processes: dict[int, BaseProcess] = {}

    def start(self, rank: int) -> None:
        host = self.hosts[rank]
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "MASTER_ADDR": self.masters[rank],
            "MASTER_PORT": str(self.port),
        }
        orders = (self.network.name(host), str(self.folder / f"hosts{host}"), place, self.method, self.backend)
        process = _CONTEXT.Process(target=live, args=orders)
        process.start()
        self.processes[rank] = process

    def kill(self, rank: int) -> None:
        process = self.processes.pop(rank)
        process.kill()
        process.join()
        process.close()

    def run(self) -> list[int | None]:
        """Return the exit status of each rank; None for one that waits."""
        order = self.draw.sample(range(self.size), self.size)
        # As long as the last rank has not begun, the others meet.
        for rank in order[:-1]:
            self.start(rank)
            time.sleep(self.draw.random() * 0.1)
        for rank in self.draw.sample(order[:-1], self.draw.randint(0, self.size - 1)):
            time.sleep(self.draw.random() * 0.5)
            self.kill(rank)
            time.sleep(self.draw.random() * 0.2)
            self.start(rank)
        self.start(order[-1])
        deadline = time.monotonic() + WITHIN_S
        for process in self.processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        return [self.processes[rank].exitcode for rank in range(self.size)]

    def close(self) -> None:
        for rank in list(self.processes):
            self.kill(rank)

    def __str__(self) -> str:
        return f"{self.method} {self.backend} {list(zip(self.hosts, self.masters, strict=True))}"


# Half an hour where nothing else runs, which other soak tests have as their limit.
@pytest.mark.timeout(4 * 3600)
def test_ranks_meet_whatever_happens_meanwhile(network: Network, tmp_path: Path) -> None:
    _CONTEXT.set_forkserver_preload(["unisono.launcher.preload"])
    ip(network, 0, "address", "add", "fd77::1/64", "dev", "eth0", "nodad")
    ip(network, 1, "address", "add", "fd77::2/64", "dev", "eth0", "nodad")
    ip(network, 1, "neighbour", "add", "fd77::9", "lladdr", "02:00:00:00:00:09", "dev", "eth0")
    for host, names in enumerate(NAMES):
        (tmp_path / f"hosts{host}").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
    seed = int(os.environ.get("UNISONO_SEED", random.randrange(1 << 30)))
    draw = random.Random(seed)
    failed = []
    for start in range(STARTS):
        job = Job(network, tmp_path, draw, 20000 + 2 * (start % 4000))
        try:
            ends = job.run()
        finally:
            job.close()
        if ends != [0] * job.size:
            failed.append(f"start {start} of seed {seed}: {job}: {ends}")
    assert not failed, "\n".join(failed)
