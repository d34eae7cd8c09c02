"""Words that order shared memory: the core's and Python's ends of rings and rounds, mixed, lose no byte."""

from __future__ import annotations

import random

import pytest
import torch
from native_core import without_core

import unisono as un
from unisono.host.native import native
from unisono.testing import pool
from unisono.transports.shm.segment import words_of

SIZES = [1, 7, 8, 100, 1000, 20_000, 70_000]
"""Elements of 8 bytes: parts of a cache line, of the ring (128 KiB), and several rings full."""


def content(sender: int, turn: int, count: int) -> torch.Tensor:
    return torch.arange(count) * 3 + turn * 1_000_003 + sender


def stressed(comm: un.Communicator, turns: int) -> int:
    """Send and receive by the core (blocking) or by Python, as each rank draws; return the wrong messages."""
    own, common, wrong = random.Random(comm.rank), random.Random(99), 0
    peer = 1 - comm.rank
    for turn in range(turns):
        sender, count = common.randrange(2), common.choice(SIZES)
        in_core = own.random() < 0.5
        if comm.rank == sender:
            tensor = content(sender, turn, count)
            comm.send(tensor, peer) if in_core else comm.isend(tensor, peer).wait()
        else:
            found = torch.full((count,), -1)
            comm.recv(found, peer) if in_core else comm.irecv(found, peer).wait()
            wrong += not torch.equal(found, content(sender, turn, count))
    return wrong


def rounds(comm: un.Communicator, turns: int) -> int:
    """Reduce by rounds of Python over one memory and of the core over another, in turn; return the wrong sums."""
    wrong, general = 0, without_core(comm)
    common = random.Random(98)
    for turn in range(turns):
        for part in (general, comm):
            count = common.choice(SIZES)
            total = content(comm.rank, turn, count)
            part.all_reduce(total)
            wrong += not torch.equal(total, content(0, turn, count) + content(1, turn, count))
    general.close()
    return wrong


@pytest.mark.parametrize("turns", [60, pytest.param(1000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("program", [stressed, rounds])
def test_mixed_ends_lose_nothing(program: object, turns: int) -> None:
    assert pool("shm", 2).run(program, turns) == [0, 0]


def test_words_are_those_of_the_memory() -> None:
    memory = memoryview(bytearray(64))
    words = words_of(memory)
    words[1] = (1 << 64) - 2
    memory.cast("Q")[2] = 5
    assert (words[0], words[1], words[2], memory.cast("Q")[1]) == (0, (1 << 64) - 2, 5, (1 << 64) - 2)
    with pytest.raises(IndexError):
        words[8]
    with pytest.raises((ValueError, TypeError)):
        words[0] = -1


@pytest.mark.skipif(native() is None, reason="no compiler was here when unisono was installed")
def test_words_keep_their_memory() -> None:
    memory = memoryview(bytearray(64))
    words = words_of(memory)
    with pytest.raises(BufferError):
        memory.release()
    del words
    memory.release()
    with pytest.raises(BufferError):
        words_of(memoryview(bytes(64)))
