"""Memory from `comm.empty` is reduced in place: the same values as with staging, for any length."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_core import without_core

import unisono as un
from unisono.testing import pool, reference

COUNTS = st.one_of(
    st.integers(0, 300),
    st.sampled_from([1 << 14, (1 << 14) + 1, 1 << 17, (1 << 17) + 3, 1 << 18, (1 << 18) + 1, 700_001]),
)


def rounds(
    comm: un.Communicator, dtype: torch.dtype, counts: list[tuple[int, int]], op: str, ordinary: list[int], core: bool
) -> list[str]:
    """Reduce several stretches of one registered buffer; complaints about each that differs from the reference.

    Args:
        ordinary: Ranks whose tensors are in other memory.
        core: Whether the native core reduces.
    """
    with comm.dup() if core else without_core(comm) as part:
        return complaints_of(part, dtype, counts, op, ordinary)


def complaints_of(
    comm: un.Communicator, dtype: torch.dtype, counts: list[tuple[int, int]], op: str, ordinary: list[int]
) -> list[str]:
    registered = comm.empty(800_000, dtype=dtype)
    complaints = []
    for number, (offset, count) in enumerate(counts):
        given_by = [
            torch.arange(count, dtype=torch.int64).add_(r + number).remainder_(3).add_(1).to(dtype)
            for r in range(comm.size)
        ]
        mine = torch.empty(count, dtype=dtype) if comm.rank in ordinary else registered[offset : offset + count]
        mine.copy_(given_by[comm.rank])
        if op == "avg" and not dtype.is_floating_point:
            continue
        comm.all_reduce(mine, op)
        complaint = reference.reduced(given_by, op).complaint(mine)
        if complaint:
            complaints.append(f"{count} elements at {offset}: {complaint}")
        registered.zero_()
        comm.barrier()
    return complaints


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.soak)])
@given(
    dtype=st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.uint8]),
    op=st.sampled_from(["sum", "max", "product", "avg"]),
    counts=st.lists(st.tuples(st.integers(0, 90_000), COUNTS), min_size=1, max_size=3),
    ordinary=st.sampled_from([[], [], [0], [1], [0, 1, 2, 3]]),
    core=st.sampled_from([True, True, False]),
)
def test_symmetric_memory_holds_the_same_values(
    size: int, dtype: torch.dtype, op: str, counts: list[tuple[int, int]], ordinary: list[int], core: bool
) -> None:
    results = pool("shm", 4).run(rounds, dtype, counts, op, ordinary, core, size=size)
    assert results == [[]] * size


def lifetimes(comm: un.Communicator) -> list[int]:
    """Return the number of mapped segments: before, with two, with a view of the second only, and with none."""

    def mapped() -> int:
        comm.barrier()
        gc.collect()
        arenas = {
            line.partition("unisono")[2]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "unisono segment" in line
        }
        comm.barrier()
        return len(arenas)

    counts = [mapped()]
    first, second = comm.empty(100_000), comm.empty((3, 50_000))
    comm.all_reduce(first)
    comm.all_reduce(second)
    counts.append(mapped())
    row = second[1]
    del first, second
    counts.append(mapped())
    row.fill_(comm.rank)
    comm.all_reduce(row)
    assert row.unique().tolist() == [1.0]
    del row
    counts.append(mapped())
    return counts


def test_symmetric_memory_is_freed_with_its_last_view() -> None:
    assert un.launch(lifetimes, 2, "shm", timeout=20) == [[0, 2, 1, 0]] * 2


def outlived(comm: un.Communicator) -> list[int]:
    """Return the number of other mapped files while only tensors remain of one communicator, two, and three."""

    def mapped() -> int:
        gc.collect()
        lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "unisono" in line]
        return len({line.split(maxsplit=5)[4] for line in lines if "unisono segment" not in line})

    kept, found = [], []
    for _ in range(3):
        with comm.dup() as part:
            kept.append(part.empty(1 << 19))
            part.all_reduce(kept[-1])
        found.append(mapped())
    return found


def test_symmetric_tensor_keeps_only_its_memory_alive() -> None:
    for found in un.launch(outlived, 2, "shm", timeout=20):
        assert found[0] == found[1] == found[2] > 0


def averages(comm: un.Communicator) -> list[list[float]]:
    """Averages of one registered buffer for which ranks call by different ways, one of them asynchronously; or none."""
    buffer = comm.empty(1 << 16)
    found = []
    for odd in range(comm.size + 1):
        buffer.fill_(comm.rank + 1)
        work = comm.all_reduce(buffer, "avg", async_op=comm.rank == odd)
        if work is not None:
            work.wait()
        found.append(buffer.unique().tolist())
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_average_is_independent_of_each_ranks_path(size: int) -> None:
    mean = (size + 1) / 2
    assert pool("shm", 4).run(averages, size=size) == [[[mean]] * (size + 1)] * size
