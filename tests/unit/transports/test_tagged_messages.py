"""Programs that use each tag once: nothing is kept of a message that is over."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import pytest
import torch

import unisono as un
from unisono.testing import pool, run_ranks

_WARM, _FURTHER = 300, 700
"""Messages of as many tags; what is kept of tags is full after the first of them."""


def grown(comm: un.Communicator, src: int | None) -> int:
    """Bytes of unisono's memory that more messages leave behind; a thread that starts keeps memory of its own."""
    tensor = torch.zeros(2)
    for tag in range(_WARM + _FURTHER):
        if tag == _WARM:
            gc.collect()
            tracemalloc.start()
        if comm.rank == 0:
            comm.send(tensor, 1, tag)
        else:
            comm.recv(tensor, src, tag)
    gc.collect()
    left = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, f"{Path(un.__file__).parent}/*")])
    tracemalloc.stop()
    return sum(trace.size for trace in left.traces)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("src", [0, None])
def test_memory_is_independent_of_the_number_of_tags(backend: str, src: int | None) -> None:
    assert max(pool(backend, 2).run(grown, src)) < 25 * _FURTHER


def crossing(comm: un.Communicator) -> list[int]:
    """Tags that are counted together, received in another order."""
    tags = [3, 259, 3, 515, 16777215]
    if comm.rank == 0:
        works = [comm.isend(torch.tensor([tag, number]), 1, tag) for number, tag in enumerate(tags)]
        found = []
    else:
        found = [torch.zeros(2, dtype=torch.int64) for _ in tags]
        works = [comm.irecv(found[number], 0, tags[number]) for number in (4, 3, 1, 0, 2)]
    for work in works:
        work.wait()
    return [int(number) for tensor in found for number in tensor]


@pytest.mark.parametrize("backend", ["thread", "shm", "gloo"])
@pytest.mark.parametrize("check", ["auto", "full"])
def test_tags_received_in_another_order(backend: str, check: str) -> None:
    expected = [3, 0, 259, 1, 3, 2, 515, 3, 16777215, 4]
    assert run_ranks(crossing, 2, backend, check=check)[1] == expected


def test_cycle_is_named_among_many_tags() -> None:
    def program(comm: un.Communicator) -> str:
        peer, tensor = 1 - comm.rank, torch.zeros(1)
        for tag in range(0, 2048, 256):
            comm.sendrecv(tensor, peer, torch.zeros(1), peer, sendtag=tag, recvtag=tag)
        with pytest.raises(un.errors.DeadlockError) as caught:
            comm.recv(tensor, peer, tag=256, timeout=0.3)
        return str(caught.value)

    assert all("waits for rank" in text for text in run_ranks(program, 2))
