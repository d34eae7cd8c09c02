"""Reduce-scatter by a reduction for each rank, and scatter by messages: what is long goes so, and is the same."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import unisono as un
from unisono.testing.cases import Case
from unisono.testing.check import Report, check_case, check_reports
from unisono.testing.pools import RankPool
from unisono.testing.strategies import cases
from unisono.transports import _mpi_scattering
from unisono.transports._mpi_scattering import dealt, one_each

RANKS = 3
CALLS = ("reduce_scatter", "reduce_scatter_single", "scatter")


@settings(max_examples=settings.default.max_examples // 2)
@given(
    case=st.sampled_from(CALLS).flatmap(lambda call: cases(RANKS, call)),
    long=st.sets(st.integers(0, RANKS - 1), max_size=RANKS),
)
@example(Case("reduce_scatter", RANKS, 5), {0})
@example(Case("reduce_scatter_single", RANKS, 5), {1, 2})
@example(Case("scatter", RANKS, 5, root=1), {0, 1})
def test_it_gives_what_it_should_on_either_way(ranks: RankPool, case: Case, long: set[int]) -> None:
    def program(comm: un.Communicator, case: Case, long: set[int]) -> Report:
        from unisono.transports import _mpi_scattering

        # A communicator of its own has not kept yet how such calls are made.
        with patch.multiple(_mpi_scattering, _BYTES=0, _DEALT_BYTES=0), comm.dup() as part:
            # The first call makes this thread the owner.
            part.barrier()
            return check_case(part, replace(case, async_op=comm.rank in long))

    case = replace(case, algorithm=None)
    check_reports(case, ranks.run(program, case, long))


def test_lists_are_read_where_they_lie_and_the_result_may_lie_in_this_ranks_own_part(ranks: RankPool) -> None:
    def program(comm: un.Communicator, count: int) -> tuple[list[str], list[list[float]]]:
        # The first call makes this thread the owner.
        comm.barrier()
        native, longer, found = comm._engine.transport._native, [], []
        run = native.run
        native.run = lambda call, deadline: longer.append(call.name) or run(call, deadline)
        try:
            apart = [torch.full((count,), float(rank)) for rank in reversed(range(comm.size))]
            for target in (torch.zeros(count), apart[comm.rank]):
                comm.reduce_scatter(target, apart)
                found.append(target.unique().tolist())
            whole = torch.arange(float(comm.size)).repeat_interleave(count)
            comm.reduce_scatter_single(whole[comm.rank * count :][:count], whole)
            found.append(whole[comm.rank * count :][:count].unique().tolist())
        finally:
            native.run = run
        return longer, found

    count = _mpi_scattering._BYTES * RANKS // 4
    for rank, (longer, found) in enumerate(ranks.run(program, count)):
        assert found == [[3.0 * (2 - rank)], [3.0 * (2 - rank)], [3.0 * rank]]
        assert longer == []


def test_a_result_in_another_ranks_part_takes_a_copy(ranks: RankPool) -> None:
    def program(comm: un.Communicator, count: int) -> list[float]:
        comm.barrier()
        whole = torch.arange(float(comm.size)).repeat_interleave(count)
        target = whole.split(count)[(comm.rank + 1) % comm.size]
        comm.reduce_scatter_single(target, whole)
        return target.unique().tolist()

    count = _mpi_scattering._BYTES * RANKS // 4
    assert ranks.run(program, count) == [[3.0 * rank] for rank in range(RANKS)]


@pytest.mark.parametrize(
    ("library", "counts", "each"),
    [
        ("Open MPI v5.0.11, package: x", (8192, 8192), True),
        ("Open MPI v5.0.11, package: x", (16383, 0), False),
        ("Open MPI v5.0.11, package: x", (0, 16384), True),
        ("Open MPI v5.0.11, package: x", (8192,) * 8, False),
        ("MPICH Version: 4.3", (1 << 20, 1 << 20), False),
    ],
)
def test_what_is_long_is_told_by_all_parts_together(library: str, counts: tuple[int, ...], each: bool) -> None:
    assert one_each(SimpleNamespace(Get_library_version=lambda: library), counts, 4) is each


@pytest.mark.parametrize(
    ("library", "nbytes", "by_messages"),
    [
        ("Open MPI v5.0.11, package: x", 4096, True),
        ("Open MPI v5.0.11", 4095, False),
        ("MPICH Version: 4.3", 1 << 20, False),
    ],
)
def test_a_scatter_is_made_of_messages_if_parts_are_long(library: str, nbytes: int, by_messages: bool) -> None:
    assert dealt(SimpleNamespace(Get_library_version=lambda: library), nbytes) is by_messages


@pytest.mark.parametrize("nbytes", [_mpi_scattering._DEALT_BYTES // 2, _mpi_scattering._DEALT_BYTES])
def test_the_roots_own_part_is_copied_unless_it_lies_there(ranks: RankPool, nbytes: int) -> None:
    def program(comm: un.Communicator, count: int) -> tuple[list[str], list[list[float]]]:
        comm.barrier()
        native, longer, found = comm._engine.transport._native, [], []
        run = native.run
        native.run = lambda call, deadline: longer.append(call.name) or run(call, deadline)
        try:
            for root in range(comm.size):
                parts = [torch.full((count,), 10.0 * root + rank) for rank in reversed(range(comm.size))]
                for target in (torch.zeros(count), parts[root] if comm.rank == root else torch.zeros(count)):
                    for _ in range(3):
                        comm.scatter(target, parts if comm.rank == root else None, root)
                    found.append(target.unique().tolist())
        finally:
            native.run = run
        return longer, found

    for rank, (longer, found) in enumerate(ranks.run(program, nbytes // 4)):
        assert found == [[10.0 * root + RANKS - 1 - rank] for root in range(RANKS) for _ in range(2)]
        assert longer == []
