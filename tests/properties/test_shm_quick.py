"""The shorter way through shared memory gives what the longer one gives, with any ranks on either."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import unisono as un
from unisono.errors import MismatchError
from unisono.testing.cases import Case
from unisono.testing.check import Report, check_case, check_reports
from unisono.testing.pools import RankPool
from unisono.testing.strategies import cases
from unisono.transports._plain import key_of
from unisono.transports._shm_calls import FORMS, _apart
from unisono.transports._shm_quick import QuickRounds

RANKS = 3
ROOTED = {"broadcast", "gather", "reduce", "scatter"}
STAGE = 1 << 20


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(RANKS, "shm", timeout=20) as pool:
        yield pool


def of_each(test: Any) -> Any:
    """An example of each call where nobody takes the longer way."""
    for place, call in enumerate(sorted(FORMS)):
        root = {"root": place % RANKS} if call in ROOTED else {}
        test = example(Case(call, RANKS, 5, **root), set())(test)
    return test


@settings(max_examples=2 * settings.default.max_examples)
@given(
    case=st.sampled_from(sorted(FORMS)).flatmap(lambda call: cases(RANKS, call)),
    long=st.sets(st.integers(0, RANKS - 1), max_size=RANKS),
)
@of_each
def test_it_gives_what_it_should_on_either_way(ranks: RankPool, case: Case, long: set[int]) -> None:
    def program(comm: un.Communicator, case: Case, long: set[int]) -> list[Report]:
        # What is kept of the first call serves the second.
        return [check_case(comm, replace(case, async_op=comm.rank in long)) for _ in range(2)]

    case = replace(case, algorithm=None)
    for reports in zip(*ranks.run(program, case, long), strict=True):
        check_reports(case, list(reports))


def calls_of(comm: un.Communicator, count: int, op: str) -> dict[str, Callable[[], object]]:
    """One of each kind, on tensors of their own."""
    here, size, dtype = comm.rank, comm.size, torch.float32

    def some(n: int = count) -> torch.Tensor:
        return torch.arange(n).add_(here).remainder_(89).to(dtype)

    root, rows = size - 1, [some() for _ in range(size)]
    return {
        "all_gather": lambda: comm.all_gather([some() for _ in rows], some()),
        "all_gather_single": lambda: comm.all_gather_single(some(count * size), some()),
        "all_to_all": lambda: comm.all_to_all([some() for _ in rows], rows),
        "all_to_all_single": lambda: comm.all_to_all_single(some(count * size), some(count * size)),
        "broadcast": lambda: comm.broadcast(some(), root),
        "gather": lambda: comm.gather(some(), [some() for _ in rows] if here == root else None, root),
        "reduce": lambda: comm.reduce(some(), root, op=op),
        "reduce_scatter": lambda: comm.reduce_scatter(some(), rows, op=op),
        "reduce_scatter_single": lambda: comm.reduce_scatter_single(some(), some(count * size), op=op),
        "scatter": lambda: comm.scatter(some(), rows if here == root else None, root),
    }


def test_plain_calls_take_it_and_no_others(ranks: RankPool) -> None:
    def program(comm: un.Communicator) -> dict[str, list[bool]]:
        taken: list[bool] = []
        real = QuickRounds.call

        def noted(self: QuickRounds, *given: Any) -> bool:
            taken.append(real(self, *given))
            return taken[-1]

        found = {}
        # The first call makes this thread the owner.
        comm.barrier()
        QuickRounds.call = noted
        try:
            for count in (1, 5, 0):
                for name, call in calls_of(comm, count, "avg").items():
                    call()
                    found[f"{name} of {count}"] = taken.copy()
                    taken.clear()
        finally:
            QuickRounds.call = real
        return found

    for found in ranks.run(program):
        assert found == {f"{name} of {count}": [count > 0] for count in (1, 5, 0) for name in FORMS}


@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize("count", [5, STAGE // 4 * 2 + 4099])
def test_short_messages_and_all_tiles_of_long_ones(ranks: RankPool, op: str, count: int) -> None:
    def program(comm: un.Communicator, op: str, count: int) -> list[bool]:
        def part(rank: int, place: int = 0) -> torch.Tensor:
            return torch.arange(count).add_(1000 * rank + place).remainder_(997).float()

        def reduced(place: int = 0) -> torch.Tensor:
            parts = torch.stack([part(rank, place) for rank in range(comm.size)])
            return parts.amax(0) if op == "max" else parts.sum(0)

        here, size, right = comm.rank, comm.size, []
        for root in range(size):
            one, other = part(here), part(here)
            comm.reduce(one, root, op=op)
            comm.broadcast(other, root)
            right += [torch.equal(one, reduced() if here == root else part(here)), torch.equal(other, part(root))]
            rows = [part(root, place) for place in range(size)]
            into = torch.zeros(count)
            comm.scatter(into, rows if here == root else None, root)
            right.append(torch.equal(into, part(root, here)))
            gathered = [torch.zeros(count) for _ in range(size)]
            comm.gather(part(here), gathered if here == root else None, root)
            right.append(
                torch.equal(torch.stack(gathered), torch.stack([part(r) * (here == root) for r in range(size)]))
            )
        into, gathered = torch.zeros(count), [torch.zeros(count) for _ in range(size)]
        comm.reduce_scatter(into, [part(here, place) for place in range(size)], op=op)
        right.append(torch.equal(into, reduced(here)))
        comm.all_to_all(gathered, [part(here, place) for place in range(size)])
        right += [torch.equal(found, part(rank, here)) for rank, found in enumerate(gathered)]
        comm.all_gather(gathered, part(here))
        right += [torch.equal(found, part(rank)) for rank, found in enumerate(gathered)]
        return right

    for size in (2, RANKS):
        for right in ranks.run(program, op, count, size=size):
            assert right == [True] * len(right)


def test_ranks_that_differ_are_told_how(ranks: RankPool) -> None:
    """Whichever way each takes."""

    def program(comm: un.Communicator, mine: list[tuple[str, int, bool]]) -> str:
        name, count, plain = mine[comm.rank]
        with comm.dup() as part:
            part.barrier()
            tensor = torch.ones(count) if plain else torch.ones(2 * count)[::2]
            into = [torch.ones(count) for _ in range(part.size)]
            try:
                if name == "broadcast":
                    part.broadcast(tensor, 0)
                elif name == "reduce":
                    part.reduce(tensor, 0)
                else:
                    part.all_to_all(into, [tensor] * part.size)
            except MismatchError as error:
                return str(error)
            return "nothing"

    for name, other, counts, words in (
        ("broadcast", "reduce", (4, 4), "ranks differ in operation, op"),
        ("broadcast", "broadcast", (4, 5), "ranks differ in counts: "),
        ("reduce", "all_to_all", (4, 4), "ranks differ in operation"),
        ("all_to_all", "all_to_all", (4, 5), "gives rank"),
    ):
        for plain in (True, False):
            told = ranks.run(program, [(name, counts[0], True), (other, counts[1], plain), (name, counts[0], True)])
            assert all(words in text and "Nothing was sent" in text for text in told), told
            assert all("test_shm_quick.py" in text for text in told), told


def test_what_shares_memory_is_refused_before_anything_moves(ranks: RankPool) -> None:
    def program(comm: un.Communicator) -> list[str]:
        memory, size = torch.arange(20.0), comm.size
        outs = [torch.zeros(4) for _ in range(size)]
        found = []
        for call in (
            lambda: comm.all_gather_single(memory[: 4 * size], memory[4 * comm.rank + 1 :][:4]),
            lambda: comm.all_gather([memory[:4]] * size, torch.ones(4)),
            lambda: comm.all_to_all(outs, outs),
            lambda: comm.gather(outs[0], [outs[0]] * size, comm.rank),
        ):
            try:
                call()
            except ValueError as error:
                found.append(str(error))
        before = memory.clone()
        # In this rank's own place, it is in place.
        mine = memory[4 * comm.rank :][:4]
        comm.all_gather_single(memory[: 4 * size], mine)
        assert torch.equal(memory, before)
        return found

    for found in ranks.run(program):
        assert len(found) == 4
        assert all("share memory" in text for text in found), found


@pytest.mark.parametrize("count", [5, 3000, STAGE // 4 + 5])
def test_negative_views_are_read_as_such(ranks: RankPool, count: int) -> None:
    """Whose memory holds the opposite of their elements."""

    def program(comm: un.Communicator, count: int) -> list[bool]:
        memory, right = torch.arange(float(count)), []
        for op in ("sum", "max"):
            one, other = torch._neg_view(memory.clone()), torch._neg_view(memory.clone())
            comm.all_reduce(one, op)
            comm.reduce(other, 1, op)
            total = -memory * (comm.size if op == "sum" else 1)
            right += [one.is_neg(), torch.equal(one, total), torch.equal(other, total if comm.rank == 1 else -memory)]
        return right

    for right in ranks.run(program, count):
        assert right == [True] * 6


def test_what_is_wrong_is_refused_as_the_longer_way_does(ranks: RankPool) -> None:
    def program(comm: un.Communicator) -> list[str]:
        size, found = comm.size, []
        rows = [torch.zeros(4) for _ in range(size)]
        of_others = [torch.zeros(4, dtype=torch.float32 if rank else torch.int32) for rank in range(size)]
        longer = [torch.zeros(4 + (rank == comm.rank)) for rank in range(size)]
        comm.barrier()
        for call in (
            lambda: comm.all_gather(of_others, torch.zeros(4)),
            lambda: comm.all_to_all(longer, rows),
            lambda: comm.all_to_all_single(torch.zeros(2, size), torch.zeros(2, size)),
            lambda: comm.reduce_scatter(torch.zeros(5), rows),
            lambda: comm.broadcast(torch.zeros(3), size),
            lambda: comm.reduce(torch.zeros(3, dtype=torch.int32), 0, "avg"),
        ):
            try:
                call()
            except ValueError as error:
                found.append(str(error))
        comm.barrier()
        return found

    words = ["must be alike", "5", "rows", "for this rank", "is no rank", "avg of torch.int32"]
    for found in ranks.run(program):
        assert len(found) == len(words), found
        for text, word in zip(found, words, strict=True):
            assert word in text, found


def test_averages_of_halves_do_not_overflow(ranks: RankPool) -> None:
    def program(comm: un.Communicator) -> list[float]:
        high = 60_000.0
        one, other = torch.full((3,), high, dtype=torch.float16), torch.zeros(3, dtype=torch.float16)
        comm.reduce_scatter(other, [one.clone() for _ in range(comm.size)], "avg")
        comm.reduce(one, 0, "avg")
        return [one[0].item() / high, other[0].item() / high]

    for found in ranks.run(program):
        assert found == pytest.approx([1, 1], rel=1e-2)


def test_what_inference_mode_has_made_is_written_by_the_longer_way(ranks: RankPool) -> None:
    def program(comm: un.Communicator) -> list[float]:
        with torch.inference_mode():
            one, rows = torch.full((3,), float(comm.rank)), [torch.zeros(3) for _ in range(comm.size)]
        comm.broadcast(one, 1)
        comm.all_gather(rows, one)
        return [one[0].item(), *(row[0].item() for row in rows)]

    assert ranks.run(program) == [[1.0] * (1 + RANKS)] * RANKS


@given(
    spans=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6), st.booleans()), max_size=5),
)
def test_what_lies_apart(spans: list[tuple[int, int, bool]]) -> None:
    memory = torch.zeros(20)
    written, read = ([memory[at : at + n] for at, n, writes in spans if writes is wanted] for wanted in (True, False))
    touching = [
        (a, b)
        for place, a in enumerate(spans)
        for b in spans[place + 1 :]
        if (a[2] or b[2]) and set(range(a[0], a[0] + a[1])) & set(range(b[0], b[0] + b[1]))
    ]
    assert _apart(written, read) is not bool(touching)


def test_what_only_inference_mode_may_write_is_left_to_the_longer_way() -> None:
    with torch.inference_mode():
        locked = torch.zeros(3)
        assert key_of("broadcast", locked, None, "", 0)
    assert not key_of("broadcast", locked, None, "", 0)
    assert not key_of("all_gather", [locked], torch.zeros(3), "", None)
