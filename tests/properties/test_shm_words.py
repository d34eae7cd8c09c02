"""Words that order shared memory: rings moved by the core and by Python, in turn, lose no byte."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch
from native_core import without_core

import unisono as un
from unisono.host.native import native
from unisono.testing import pool

CORE = native()
pytestmark = pytest.mark.skipif(CORE is None, reason="no compiler was here when unisono was installed")

SIZES = [1, 7, 8, 100, 1000, 20_000, 70_000]
"""Elements of 8 bytes: parts of a cache line, of the ring (128 KiB), and several rings full."""


def words_in(memory: memoryview) -> Any:
    assert CORE is not None
    return CORE.SharedWords(memory)


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
    """Reduce by messages over one memory and by rounds of the core over another, in turn; return the wrong sums."""
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
    words = words_in(memory)
    words[1] = (1 << 64) - 2
    memory.cast("Q")[2] = 5
    assert (words[0], words[1], words[2], memory.cast("Q")[1]) == (0, (1 << 64) - 2, 5, (1 << 64) - 2)
    with pytest.raises(IndexError):
        words[8]
    with pytest.raises((ValueError, TypeError)):
        words[0] = -1


def test_words_keep_their_memory() -> None:
    memory = memoryview(bytearray(64))
    words = words_in(memory)
    with pytest.raises(BufferError):
        memory.release()
    del words
    memory.release()
    with pytest.raises(BufferError):
        words_in(memoryview(bytes(64)))


def test_wait_ends_when_woken_or_late_or_if_the_word_has_changed() -> None:
    words = words_in(memoryview(bytearray(64)))
    words[1] = 5
    words.wait(1, 4, 1000.0)
    began = time.monotonic()
    words.wait(1, 5, 0.02)
    assert time.monotonic() - began >= 0.02
    thread = threading.Thread(target=words.wait, args=(1, 5, 1e6))
    thread.start()
    while thread.is_alive():
        words.wake(1)
    with pytest.raises(IndexError):
        words.wait(8, 0, 0.0)
