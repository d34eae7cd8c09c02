"""Random programs on tcp against the same ones on simulated ranks: communicators, messages and threads side by side."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest
import torch

import unisono as un
from unisono.testing import pool, run_ranks

STEPS = 12
# Empty, short, just within and above what goes at once, and long enough to fill a connection.
LENGTHS = (0, 1, 7, 1000, 8192, 8193, 16_385, 400_000)


class Program:
    """One rank's part of a program. All ranks draw the same numbers.

    Args:
        comm: All ranks.
        seed: Of the program.
    """

    def __init__(self, comm: un.Communicator, seed: int) -> None:
        self.random = random.Random(seed)
        half = comm.split(comm.rank % 2)
        again = comm.subgroup(range(comm.size))
        assert again is not None
        self.comms = [comm, half, again]
        self.tensors: list[torch.Tensor] = []
        self.senders: list[list[int]] = []
        self.waits: list[Callable[[], Any]] = []

    def run(self) -> tuple[list[tuple[list[float], str]], list[list[int]]]:
        for step in range(STEPS):
            comm = self.comms[self.random.randrange(len(self.comms))]
            kinds = (self.all_reduce, self.broadcast, self.all_gather, self.all_to_all, self.message, self.any_source)
            self.random.choice(kinds)(comm, self.random.choice(LENGTHS), step)
            if self.random.random() < 0.3:
                self.wait_for_all()
        self.wait_for_all()
        for part in self.comms[1:]:
            part.close()
        # The first elements for the reader of a failure, and what stands for all of them.
        found = [(tensor[:3].tolist(), sha256(tensor.numpy().tobytes()).hexdigest()) for tensor in self.tensors]
        return found, self.senders

    def wait_for_all(self) -> None:
        """Wait in threads, half of the time."""
        waits, self.waits = self.waits, []
        if self.random.random() < 0.5:
            threads = [threading.Thread(target=wait) for wait in waits]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        else:
            for wait in waits:
                wait()

    def filled(self, comm: un.Communicator, numel: int, step: int) -> torch.Tensor:
        made = torch.arange(numel, dtype=torch.float32) % 13 + comm.rank + step
        self.tensors.append(made)
        return made

    def all_reduce(self, comm: un.Communicator, numel: int, step: int) -> None:
        op = self.random.choice(["sum", "max", "avg"])
        work = comm.all_reduce(self.filled(comm, numel, step), op, async_op=self.random.random() < 0.5)
        if work is not None:
            self.waits.append(work.wait)

    def broadcast(self, comm: un.Communicator, numel: int, step: int) -> None:
        root = self.random.randrange(12) % comm.size
        work = comm.broadcast(self.filled(comm, numel, step), root, async_op=self.random.random() < 0.5)
        if work is not None:
            self.waits.append(work.wait)

    def all_gather(self, comm: un.Communicator, numel: int, step: int) -> None:
        mine = self.filled(comm, numel, step)
        comm.all_gather([self.filled(comm, numel, step) for _ in range(comm.size)], mine)

    def all_to_all(self, comm: un.Communicator, numel: int, step: int) -> None:
        """Rank a sends rank b a + b elements more."""
        sent = [self.filled(comm, numel + comm.rank + peer, step) for peer in range(comm.size)]
        comm.all_to_all([self.filled(comm, numel + comm.rank + peer, step) for peer in range(comm.size)], sent)

    def message(self, comm: un.Communicator, numel: int, step: int) -> None:
        source, target = self.random.randrange(12) % comm.size, self.random.randrange(12) % comm.size
        if comm.rank == source:
            self.waits.append(comm.isend(self.filled(comm, numel, step), target, step).wait)
        if comm.rank == target:
            self.waits.append(comm.irecv(self.filled(comm, numel, step), source, step).wait)

    def any_source(self, comm: un.Communicator, numel: int, step: int) -> None:
        target = self.random.randrange(12) % comm.size
        if comm.rank != target:
            self.waits.append(comm.isend(self.filled(comm, numel, step), target, step).wait)
            return
        # Which of them comes first differs from run to run.
        buffers = [torch.empty(numel) for _ in range(comm.size - 1)]
        sources = [comm.recv(buffer, tag=step) for buffer in buffers]
        self.senders.append(sorted(sources))
        self.tensors += [buffer for _, buffer in sorted(zip(sources, buffers, strict=True), key=lambda each: each[0])]


def outcomes(comm: un.Communicator, seeds: range) -> list[Any]:
    return [Program(comm, seed).run() for seed in seeds]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.soak), 3])
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.soak) for first in range(5, 500, 5))])
def test_programs_end_alike(first: int, size: int) -> None:
    seeds = range(first, first + 5)
    expected = run_ranks(outcomes, size, "sim", seeds)
    assert pool("tcp", 4).run(outcomes, seeds, size=size) == expected
