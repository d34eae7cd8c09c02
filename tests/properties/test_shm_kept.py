"""Calls through shared memory with the tensors of an earlier one: what was found out about these is kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from again_kit import check_called_again, of_each_change
from hypothesis import given
from hypothesis import strategies as st
from made_kit import RANKS, Kind, Made, kinds

import unisono as un
from unisono.errors import MismatchError
from unisono.testing.pools import RankPool
from unisono.transports._shm_calls import FORMS
from unisono.transports._shm_quick import QuickRounds


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(RANKS, "shm", timeout=20) as pool:
        yield pool


@of_each_change
def test_a_call_is_made_again_with_what_the_tensor_is_by_then(ranks: RankPool, name: str, changes: list[Any]) -> None:
    check_called_again(ranks, name, changes)


@given(
    size=st.integers(2, RANKS),
    chosen=st.lists(kinds, min_size=1, max_size=3),
    steps=st.lists(st.tuples(st.integers(0, 2), st.sets(st.integers(0, RANKS - 1), max_size=1)), max_size=16),
)
def test_calls_again_and_again(
    ranks: RankPool, size: int, chosen: list[Kind], steps: list[tuple[int, set[int]]]
) -> None:
    """From the third time on they are made by what was kept; on some rank now and then the longer way."""

    def program(comm: un.Communicator, chosen: list[Kind], steps: list[tuple[int, set[int]]]) -> list[bool]:
        made = [Made(comm, kind) for kind in chosen]
        return [
            made[which % len(made)].make(number, {"async_op": True} if comm.rank in long else {})
            for number, (which, long) in enumerate([(0, set()), (1, set()), (2, set()), *steps, *steps])
        ]

    for right in ranks.run(program, chosen, steps, size=size):
        assert right == [True] * len(right)


@pytest.mark.parametrize("size", [2, RANKS])
@pytest.mark.parametrize("name", ["all_reduce", *sorted(FORMS)])
def test_what_is_as_long_as_can_be_kept_and_longer(ranks: RankPool, name: str, size: int) -> None:
    """Also where one rank suddenly takes the longer way."""
    stage = 1 << 20
    most = {"all_reduce": (64 << 10) - 1, "reduce": stage if size == 2 else 128 << 10}
    most |= dict.fromkeys(["all_gather", "all_gather_single", "broadcast", "gather"], stage)
    counts = [most.get(name, stage // size) // 4 + more for more in (0, 1)]

    def program(comm: un.Communicator, name: str, counts: list[int]) -> list[bool]:
        right = []
        for count in counts:
            made = Made(comm, (name, count, torch.float32, "sum", 1))
            right += [made.make(number, {}) for number in range(3)]
            right += [made.make(4, {"async_op": True} if comm.rank == 0 else {}), made.make(5, {})]
        return right

    for right in ranks.run(program, name, counts, size=size):
        assert right == [True] * 5 * len(counts)


@pytest.mark.parametrize("count", [16_383, 16_384, 30_000])
def test_memory_that_is_handed_out_later(ranks: RankPool, count: int) -> None:
    """From then on calls of some length ask where ranks' tensors lie, whoever makes them again."""

    def program(comm: un.Communicator, count: int) -> list[bool]:
        with comm.dup() as part:
            part.barrier()
            kind = "all_reduce", count, torch.float32, "sum", 0
            one = Made(part, kind)
            right = [one.make(number, {}) for number in range(3)]
            part.empty(10)
            return [*right, (Made(part, kind) if part.rank == 0 else one).make(4, {}), one.make(5, {})]

    assert ranks.run(program, count) == [[True] * 5] * RANKS


def kept_by(comm: un.Communicator) -> list[bool]:
    """Whether calls with the same tensors came to `_anew`, from the first one on."""
    came: list[bool] = []
    real = QuickRounds._anew

    def noted(self: QuickRounds, *given: Any) -> bool:
        came.append(True)
        return real(self, *given)

    found = []
    QuickRounds._anew = noted
    try:
        for name in ["all_reduce", *sorted(FORMS)]:
            one = Made(comm, (name, 5, torch.float32, "avg", 1))
            for number in range(4):
                assert one.make(number, {})
            found.append(len(came))
            came.clear()
    finally:
        QuickRounds._anew = real
    return found


def test_what_comes_again_is_kept(ranks: RankPool) -> None:
    def program(comm: un.Communicator) -> tuple[bool, list[int]]:
        comm.barrier()
        return comm._engine.quick._rounds.laying.storing is not None, kept_by(comm)

    for compiled, found in ranks.run(program):
        assert found == [2 if compiled else 4] * (1 + len(FORMS))


@pytest.mark.parametrize("size", [2, RANKS])
def test_autograd_knows_what_was_written(ranks: RankPool, size: int) -> None:
    def program(comm: un.Communicator) -> list[list[int]]:
        """Whether versions have grown, once a call is kept if it is short: of what is written, and of what is not."""
        grown = []
        for name in ("all_reduce", *sorted(FORMS)):
            one = Made(comm, (name, 5, torch.float32, "sum", 1))
            tensors = [one.one, one.other, one.whole[0], one.rows[0], one.whole[1], one.more[0]]
            for number in range(3):
                one.make(number, {})
            before = [tensor._version for tensor in tensors]
            one.make(3, {})
            # The test itself writes to each of them once.
            grown.append([int(tensor._version > was + 1) for tensor, was in zip(tensors, before, strict=True)])
        return grown

    written = {"all_reduce": 0, "all_gather": 3, "all_gather_single": 2, "all_to_all": 3, "all_to_all_single": 2}
    written |= {"broadcast": 0, "gather": 3, "reduce": 0, "reduce_scatter": 1, "reduce_scatter_single": 1, "scatter": 1}
    for rank, grown in enumerate(ranks.run(program, size=size)):
        for name, found in zip(("all_reduce", *sorted(FORMS)), grown, strict=True):
            gets = {"broadcast": rank != 1, "gather": rank == 1, "reduce": rank == 1}.get(name, True)
            assert found == [int(gets and place == written[name]) for place in range(6)], name


def test_numbers_that_become_conjugate_views_are_read_as_such(ranks: RankPool) -> None:
    def program(comm: un.Communicator) -> str:
        numbers = torch.ones(2, dtype=torch.complex64)
        for _ in range(3):
            comm.broadcast(numbers, 1)
        numbers += comm.rank * 1j
        if comm.rank == 1:
            numbers.data = numbers.data.conj()
        comm.broadcast(numbers, 1)
        return str(numbers.resolve_conj().tolist())

    assert ranks.run(program) == ["[(1-1j), (1-1j)]"] * RANKS


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather"])
def test_memory_that_is_to_be_read_as_its_opposite(ranks: RankPool, name: str) -> None:
    """By the very tensor that had a call kept."""

    def program(comm: un.Communicator, name: str) -> list[float]:
        memory = torch.full((5,), -3.0)
        one, rows = torch.zeros(5), [torch.zeros(5) for _ in range(comm.size)]
        one.data = memory
        call = {
            "all_reduce": lambda: comm.all_reduce(one, "avg"),
            "broadcast": lambda: comm.broadcast(one, 1),
            "all_gather": lambda: comm.all_gather(rows, one),
        }[name]
        for _ in range(3):
            call()
        one.data = torch._neg_view(memory)
        call()
        return [one[0].item(), *((row[0].item() for row in rows) if name == "all_gather" else ())]

    assert ranks.run(program, name) == [[3.0] * (1 + RANKS * (name == "all_gather"))] * RANKS


def test_nans_have_the_same_bits_on_all_ranks(ranks: RankPool) -> None:
    """Also where this rank's call is kept, and another one's tensor is new each time."""

    def program(comm: un.Communicator) -> list[list[int]]:
        one, bits = torch.zeros(2), []
        for _ in range(5):
            tensor = one if comm.rank == 0 else torch.zeros(2)
            tensor.view(torch.int32).fill_(0x7FC00001 + comm.rank)
            comm.all_reduce(tensor)
            bits.append(tensor.view(torch.int32).tolist())
        return bits

    (first, *others) = ranks.run(program)
    assert others == [first] * (RANKS - 1)
    assert first == [first[0]] * 5


def test_rows_of_other_lengths_come_where_all_were_alike(ranks: RankPool) -> None:
    """This rank's tensors are those of a call that is kept, and the others' are not."""

    def program(comm: un.Communicator) -> list[list[float]]:
        table = [[4, 4, 4], [4, 5, 6], [4, 7, 4]]
        given_, taken = ([torch.full((4,), float(comm.rank)) for _ in range(3)] for _ in range(2))
        for _ in range(3):
            comm.all_to_all(taken, given_)
        if comm.rank:
            given_ = [torch.full((n,), float(comm.rank)) for n in table[comm.rank]]
            taken = [torch.zeros(row[comm.rank]) for row in table]
        for tensor in taken:
            tensor.zero_()
        comm.all_to_all(taken, given_)
        return [tensor.tolist() for tensor in taken]

    table = [[4, 4, 4], [4, 5, 6], [4, 7, 4]]
    for rank, found in enumerate(ranks.run(program)):
        assert found == [[float(other)] * table[other][rank] for other in range(RANKS)]


def test_kept_calls_that_differ_are_told_how(ranks: RankPool) -> None:
    def program(comm: un.Communicator, names: list[str], counts: list[int]) -> str:
        with comm.dup() as part:
            part.barrier()
            calls = {
                (name, count): Made(part, (name, count, torch.float32, "sum", 0))
                for name in ("broadcast", "reduce", "all_to_all")
                for count in (4, 5)
            }
            for number in range(3):
                for call in calls.values():
                    assert call.make(number, {})
            try:
                calls[names[part.rank], counts[part.rank]].make(9, {})
            except MismatchError as error:
                return str(error)
            return "nothing"

    for names, counts, words in (
        (["broadcast", "reduce", "reduce"], [4, 4, 4], "ranks differ in operation, op"),
        (["reduce"] * 3, [4, 4, 5], "ranks differ in counts: "),
        (["all_to_all"] * 3, [5, 4, 4], "gives rank"),
    ):
        for text in ranks.run(program, names, counts):
            assert words in text
            assert "Nothing was sent" in text
            assert "made_kit.py" in text


def test_what_is_kept_holds_no_tensor_and_goes_with_its_owner(ranks: RankPool) -> None:
    """At once: memory that is shared is to be unmapped when its last user goes."""

    def program(comm: un.Communicator) -> list[bool]:
        with comm.dup() as part:
            part.barrier()
            one = Made(part, ("all_gather", 5, torch.float32, "sum", 0))
            for number in range(3):
                one.make(number, {})
            transport = part._engine.transport
            row, quick = weakref.ref(one.rows[0]), weakref.ref(transport.quick)
            maker = weakref.ref(transport.quick._maker)
            gc.disable()
            try:
                del one
                part._engine.quick = transport.quick = transport._quick = None
                return [known() is None for known in (row, quick, maker)]
            finally:
                gc.enable()

    assert ranks.run(program) == [[True] * 3] * RANKS
