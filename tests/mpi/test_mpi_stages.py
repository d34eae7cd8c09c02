"""Long sums on one host: made in memory that ranks share, if every rank comes the shorter way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import unisono as un
from unisono.testing.cases import Case
from unisono.testing.check import Report, check_case, check_reports
from unisono.testing.pools import RankPool
from unisono.testing.strategies import cases
from unisono.transports._mpi_stages import LEAST

RANKS = 3


@settings(max_examples=settings.default.max_examples // 2)
@given(
    case=st.sampled_from(["all_reduce", "reduce"]).flatmap(lambda call: cases(RANKS, call)),
    long=st.sets(st.integers(0, RANKS - 1), max_size=RANKS),
)
@example(Case("all_reduce", RANKS, 5), set())
@example(Case("all_reduce", RANKS, 5, op="avg"), {1})
@example(Case("reduce", RANKS, 5, root=1), set())
@example(Case("reduce", RANKS, 5, root=1), {0, 1})
@example(Case("reduce", RANKS, 5, root=2, op="avg"), set())
def test_it_gives_what_it_should_on_either_way(ranks: RankPool, case: Case, long: set[int]) -> None:
    def program(comm: un.Communicator, case: Case, long: set[int]) -> Report:
        from unittest.mock import patch

        from unisono.transports import _mpi_stages

        # A communicator of its own has not kept yet how such calls are made.
        with patch.object(_mpi_stages, "LEAST", 1), comm.dup() as part:
            # The first call makes this thread the owner.
            part.barrier()
            return check_case(part, replace(case, async_op=comm.rank in long))

    case = replace(case, algorithm=None)
    check_reports(case, ranks.run(program, case, long))


def summed(
    comm: un.Communicator, ranks: int, name: str, count: int, dtype: torch.dtype, op: str
) -> list[tuple[int, bool]] | None:
    """How often ranks met in each of some calls, and whether its result was right."""
    with comm.split(0 if comm.rank < ranks else 1) as part:
        part.barrier()
        if comm.rank >= ranks:
            return None
        page, found = part._engine.transport._agreement.page, []
        tensor = torch.zeros(count, dtype=dtype)
        for root in (0, 0, 0, 1):
            values = [torch.arange(count).add_(7 * rank).remainder_(1000).to(dtype) for rank in range(ranks)]
            tensor.copy_(values[part.rank])
            before = 0 if page is None else page.number
            if name == "reduce":
                part.reduce(tensor, root, op=op)
            else:
                part.all_reduce(tensor, op=op)
            met = 0 if page is None else page.number - before - 1
            total = sum(values) if op == "sum" else torch.stack(values).amax(0) if op == "max" else sum(values) / ranks
            right = total if name == "all_reduce" or part.rank == root else values[part.rank]
            found.append((met, torch.allclose(tensor, right)))
    return found


@pytest.mark.parametrize("size", [2, RANKS])
@pytest.mark.parametrize(
    ("name", "dtype", "op", "times"),
    [
        ("all_reduce", torch.float32, "sum", 2),
        ("all_reduce", torch.float64, "avg", 2),
        ("reduce", torch.float32, "sum", 2),
        ("reduce", torch.float64, "avg", 2),
        ("all_reduce", torch.int32, "sum", 0),
        ("all_reduce", torch.float32, "max", 0),
        ("reduce", torch.int64, "sum", 0),
        ("all_reduce", torch.complex64, "sum", 0),
    ],
)
def test_long_sums_of_floats_are_made_there(
    ranks: RankPool, size: int, name: str, dtype: torch.dtype, op: str, times: int
) -> None:
    # Without the compiled parts, none is.
    (can,) = set(ranks.run(lambda comm: comm._engine.quick._near.add is not None))
    if size == 2 and name == "reduce":
        # Who gets it sums alone.
        times = min(times, 1)
    at, stage_bytes = LEAST // dtype.itemsize, 1 << 19
    for count, tiles in ((at, 1), (at - 1, 0), (200_003, -(-200_003 * dtype.itemsize // stage_bytes))):
        told = ranks.run(summed, size, name, count, dtype, op)
        assert told[size:] == [None] * (RANKS - size)
        assert told[:size] == [[(times * tiles * can, True)] * 4] * size


def test_who_waits_in_the_middle_of_a_sum_is_told_that_another_failed(ranks: RankPool) -> None:
    def program(comm: un.Communicator) -> str | None:
        def broken(*_: object) -> None:
            raise OSError("no part in it")

        if comm._engine.quick._near.add is None:
            return None
        with comm.dup() as part:
            part.barrier()
            if comm.rank == 1:
                # It has agreed to the call.
                part._engine.quick._native.make = broken
            try:
                part.all_reduce(torch.ones(5000))
            except (un.CommError, OSError) as error:
                return str(error)
            return "nothing"

    told = ranks.run(program)
    if told != [None] * RANKS:
        assert told[1] == "no part in it"
        for text in (told[0], told[2]):
            assert "rank 1 failed in all_reduce: OSError: no part in it" in text
