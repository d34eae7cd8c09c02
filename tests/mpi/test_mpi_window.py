"""Long parts on one host: ranks read each other's memory, if every rank's parts are fit for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import unisono as un
from unisono.testing.cases import Case
from unisono.testing.check import Report, check_case, check_reports
from unisono.testing.pools import RankPool
from unisono.testing.strategies import cases
from unisono.transports._mpi_window import LEAST, Window

RANKS = 3
CALLS = (
    "all_gather",
    "all_gather_single",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "scatter",
)


def each_alone(test: Any) -> Any:
    """An example of each call where nobody takes the longer way."""
    for place, call in enumerate(CALLS):
        case = (
            Case(call, RANKS, 5, root=place % RANKS)
            if call in ("broadcast", "gather", "scatter")
            else Case(call, RANKS, 5)
        )
        test = example(case, set())(test)
    return test


@settings(max_examples=settings.default.max_examples // 2)
@given(
    case=st.sampled_from(CALLS).flatmap(lambda call: cases(RANKS, call)),
    long=st.sets(st.integers(0, RANKS - 1), max_size=RANKS),
)
@example(Case("all_to_all_single", RANKS, 5), {0})
@example(Case("gather", RANKS, 5, root=1), {0, 1})
@each_alone
def test_it_gives_what_it_should_on_either_way(ranks: RankPool, case: Case, long: set[int]) -> None:
    def program(comm: un.Communicator, case: Case, long: set[int]) -> Report:
        from unittest.mock import patch

        from unisono.transports import _mpi_scattering, _mpi_window

        # A communicator of its own has not kept yet how such calls are made; and these have as many ranks as they like.
        with (
            patch.multiple(_mpi_window, LEAST=1, _UNCROWDED=frozenset()),
            patch.object(_mpi_scattering, "_DEALT_BYTES", 0),
            comm.dup() as part,
        ):
            # The first call makes this thread the owner.
            part.barrier()
            return check_case(part, replace(case, async_op=comm.rank in long))

    case = replace(case, algorithm=None)
    check_reports(case, ranks.run(program, case, long))


def moved(comm: un.Communicator, name: str, count: int, apart: set[int], rounds: int) -> tuple[list[int], list[bool]]:
    """How often memory was read in each of some calls, and whether the results were right.

    Args:
        comm: Of all ranks.
        name: Of a collective.
        count: Elements of each part.
        apart: Ranks one of whose parts is longer than the others', where there are lists.
        rounds: How many calls, each with the tensors of the one before.
    """
    from unisono.transports import _mpi_window

    before, _mpi_window._UNCROWDED = _mpi_window._UNCROWDED, frozenset()
    with comm.dup() as part:
        part.barrier()
        quick, size, read, right = part._engine.quick, part.size, [], []
        page = part._engine.transport._agreement.page
        assert page is None or quick._near.window is not None
        lengths = [count + (7 if {rank, part.rank} & apart else 0) for rank in range(size)]
        into = [torch.zeros(length) for length in lengths]
        given_ = [torch.zeros(length) for length in lengths]
        for number in range(rounds):
            for rank, tensor in enumerate(given_):
                tensor.fill_(100 * number + 10 * part.rank + rank)
                into[rank].zero_()
            sums = 0 if page is None else page.number
            if name == "all_to_all":
                part.all_to_all(into, given_)
                wanted = [100 * number + 10 * rank + part.rank for rank in range(size)]
            elif name == "all_gather":
                part.all_gather(into, given_[part.rank])
                wanted = [100 * number + 11 * rank for rank in range(size)]
            else:
                part.broadcast(given_[1], 1)
                into[1].copy_(given_[1])
                wanted = [0, 100 * number + 11, 0]
            read.append(0 if page is None else (page.number - sums - 1) // 2)
            right.append(all(bool((tensor == value).all()) for tensor, value in zip(into, wanted, strict=True)))
    _mpi_window._UNCROWDED = before
    return read, right


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "broadcast"])
def test_long_parts_of_one_length_are_read(ranks: RankPool, name: str) -> None:
    # Without the compiled parts, nothing is.
    (can,) = set(ranks.run(lambda comm: comm._engine.quick._near.window is not None))
    at = LEAST // 4
    for count, times in ((at, 1), (at - 1, 0), (100_000, 1)):
        for read, right in ranks.run(moved, name, count, set(), 4):
            assert right == [True] * 4
            assert read == [times * can] * 4


def test_parts_of_several_lengths_are_not(ranks: RankPool) -> None:
    for read, right in ranks.run(moved, "all_to_all", 5000, {1}, 3):
        assert (read, right) == ([0] * 3, [True] * 3)


def test_where_memory_may_not_be_read_mpi_moves_it(ranks: RankPool) -> None:
    def program(comm: un.Communicator) -> tuple[bool, list[float]]:
        from unisono.transports import _mpi_page

        real = _mpi_page.part

        class Blind:
            def __init__(self, *given: object) -> None:
                self.move = None

            def reads(self, rank: int, address: int, into: bytearray) -> bool:
                return comm.rank != 1

        _mpi_page.part = lambda name: Blind if name == "Window" else real(name)
        try:
            with comm.dup() as part:
                into = [torch.zeros(5000) for _ in range(part.size)]
                for _ in range(3):
                    part.all_gather(into, torch.full((5000,), comm.rank + 1.0))
                return part._engine.quick._near.window is None, [tensor.mean().item() for tensor in into]
        finally:
            _mpi_page.part = real

    assert ranks.run(program) == [(True, [1.0, 2.0, 3.0])] * RANKS


def test_where_it_serves() -> None:
    few, many = Window(print, crowded=False), Window(print, crowded=True)
    for name in ("all_gather", "all_to_all", "broadcast", "gather", "scatter"):
        assert [few.serves(name, nbytes) for nbytes in (0, LEAST - 1, LEAST, 1 << 22)] == [False, False, True, True]
        assert many.serves(name, LEAST) is (name not in ("gather", "scatter"))
        # One rank alone reads, or is read.
        assert few.serves(name, 1 << 23) is (name not in ("broadcast", "gather"))
