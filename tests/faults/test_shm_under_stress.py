"""Shared memory under stress: one core for all ranks, ten concurrent groups, a death in a long sum."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time

import pytest
import torch
from insides import control_of
from leaks import held, wait_until_as

import unisono as un
from unisono.errors import PeerLostError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are bound to a core on Linux alone")

LONG = 25 << 20
"""Elements of 4 bytes: 100 MiB."""


def small_sums(comm: un.Communicator, rounds: int) -> int:
    """Sums of random lengths with both ranks on the same core; how many were wrong."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    draw, wrong = random.Random(5), 0
    for number in range(rounds):
        tensor = torch.full((draw.randint(0, 300),), float(comm.rank + number % 1000))
        comm.all_reduce(tensor)
        wrong += not bool((tensor == 2 * (number % 1000) + 1).all())
    return wrong


@pytest.mark.parametrize("rounds", [1_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_results_are_exact_on_one_core(rounds: int) -> None:
    assert un.launch(small_sums, 2, "shm", (rounds,), threads=1, timeout=30) == [0, 0]


def ten_groups(comm: un.Communicator, rounds: int) -> list[float]:
    """Each group in a thread of its own; the last sum of each."""
    parts, found = [comm.dup() for _ in range(10)], [0.0] * 10

    def work(index: int) -> None:
        part = parts[index]
        for number in range(rounds):
            tensor = torch.full((1 + 997 * index,), float(index * number))
            part.all_reduce(tensor)
            assert tensor.eq(comm.size * index * number).all()
        found[index] = tensor[-1].item()

    for part in parts:
        part.release_thread()
    threads = [threading.Thread(target=work, args=(index,)) for index in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ten_groups_concurrently() -> None:
    rounds = 50
    wanted = [3.0 * index * (rounds - 1) for index in range(10)]
    assert un.launch(ten_groups, 3, "shm", (rounds,), threads=1, timeout=60) == [wanted] * 3


def dies_in_a_long_sum(comm: un.Communicator) -> tuple[int | None, float]:
    """Return the lost rank that this rank's error names, and the time since its death."""
    tensor, control = torch.ones(LONG), control_of(comm)

    def die() -> None:
        control.set("death", str(time.monotonic()).encode())
        os.kill(os.getpid(), signal.SIGKILL)

    comm.barrier()
    if comm.rank == 1:
        threading.Timer(0.3, die).start()
    try:
        while True:
            comm.all_reduce(tensor)
    except PeerLostError as error:
        return error.peer, time.monotonic() - float(control.get("death", 5.0))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_rank_dies_during_a_message_of_100_mib(size: int) -> None:
    # The forkserver stays.
    un.launch(lambda comm: None, 1, "shm")
    before = held()
    ends = un.launch(dies_in_a_long_sum, size, "shm", threads=1, timeout=30, on_failure="continue")
    for rank, end in enumerate(ends):
        if rank == 1:
            assert isinstance(end, PeerLostError)
        else:
            peer, seconds = end
            assert peer == 1
            assert seconds < 15.0
    assert wait_until_as(before, "threads", "descriptors", "processes") == ""
