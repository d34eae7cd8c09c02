"""Ranks that wait in an all_reduce on shared memory sum what others have laid ready; taking it back is noticed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from ahead_kit import eager, needed
from patience import until

import unisono as un
from unisono.errors import MismatchError
from unisono.testing import pool

PAIR = partial(pool("shm", 3).run, size=2)


def told(comm: un.Communicator, memory: torch.Tensor, count: int = 0) -> Any:
    """Tell that the first elements are ready, and that this rank calls for this memory next."""
    ready = comm.ready(memory)
    assert ready is not None
    ready.open()
    ready.told[0][0] = ready.told[1][0] + count * memory.element_size()
    return ready


@needed
@pytest.mark.parametrize("op", ["avg", "sum"])
@pytest.mark.parametrize("odd", [None, 0, 1])
def test_what_is_ready_is_summed_before_the_last_rank_comes(op: str, odd: int | None) -> None:
    """Also where a rank calls in another way than the others, and divides by itself."""

    def program(comm: un.Communicator) -> tuple[list[float], list[float]]:
        with eager(comm) as part:
            memory = part.empty(50, dtype=torch.float64)
            for _ in range(2):
                memory.copy_(torch.arange(50.0) + 10 * part.rank)
                seen = memory
                if part.rank == 0:
                    told(part, memory)
                else:
                    told(part, memory, 13)
                    # 13 elements are 6 whole pieces.
                    assert until(lambda: memory[11] != 21.0)
                    seen = memory.clone()
                work = part.all_reduce(memory, op, async_op=part.rank == odd)
                if work is not None:
                    work.wait()
            return seen.tolist(), memory.tolist()

    total = [(2 * i + 10.0) / (2 if op == "avg" else 1) for i in range(50)]
    (_, first), (seen, second) = PAIR(program)
    assert first == second == total
    # Of a rank that calls otherwise the early sums are not divided.
    early = [2 * i + 10.0 for i in range(12)] if odd == 0 else total[:12]
    assert seen == early + [i + 10.0 for i in range(12, 50)]


@needed
def test_what_is_taken_back_is_not_summed_any_more() -> None:
    def program(comm: un.Communicator) -> tuple[list[bool], list[float]]:
        with eager(comm) as part:
            memory = part.empty(8)
            memory.fill_(part.rank + 1.0)
            untouched = []
            if part.rank == 1:
                ready = told(part, memory, 8)
                untouched.append(ready.withdraw())
                memory.fill_(5.0)
            else:
                told(part, memory, 8)
            comm.barrier()
            part.all_reduce(memory)
            return untouched, memory.tolist()

    assert [found for _, found in PAIR(program)] == [[6.0] * 8] * 2
    assert PAIR(program)[1][0] == [True]


@needed
def test_who_takes_back_what_others_have_summed_is_told() -> None:
    def program(comm: un.Communicator) -> list[bool]:
        with eager(comm) as part:
            memory = part.empty(8)
            memory.fill_(part.rank + 1.0)
            untouched = []
            if part.rank == 1:
                ready = told(part, memory, 4)
                assert until(lambda: memory[3] == 3.0)
                untouched = [ready.withdraw(), ready.withdraw()]
                ready.open()
                untouched.append(ready.withdraw())
            else:
                told(part, memory)
            part.all_reduce(memory)
            if part.rank == 1:
                untouched.append(ready.withdraw())
                ready.open()
                untouched.append(ready.withdraw())
            return untouched

    assert PAIR(program)[1] == [False, False, False, True, True]


@needed
def test_who_calls_for_other_memory_than_it_has_told_of_is_told() -> None:
    def program(comm: un.Communicator) -> str:
        with eager(comm) as part:
            memory = part.empty(8)
            memory.fill_(part.rank + 1.0)
            if part.rank == 1:
                told(part, memory, 4)
                assert until(lambda: memory[3] == 3.0)
            else:
                told(part, memory)
            with pytest.raises(MismatchError) as caught:
                part.all_reduce(torch.ones(8) if part.rank else memory)
            return str(caught.value)

    for message in PAIR(program):
        assert "called another one" in message


@pytest.mark.parametrize("why", ["short", "integers", "one rank", "elsewhere", "view", "turned"])
def test_nobody_asks_where_nothing_is_gained(why: str) -> None:
    def program(comm: un.Communicator) -> bool:
        with eager(comm, least_bytes=64) as part:
            count, dtype = 9 if why == "short" else 400, torch.int64 if why == "integers" else torch.float32
            memory = part.empty(count, dtype=dtype)
            square = memory.view(2 * [int(count**0.5)])
            given = {"elsewhere": torch.zeros(400), "view": memory[1:], "turned": square.t()}.get(why, memory)
            return part.ready(given) is None

    assert pool("shm", 3).run(program, size=1 if why == "one rank" else 2) == [True] * (1 if why == "one rank" else 2)


@pytest.mark.parametrize(("name", "value"), [("cores", 1), ("compiled_sums", False)])
def test_nobody_asks_where_some_rank_cannot_sum_while_it_waits(name: str, value: int) -> None:
    def program(comm: un.Communicator) -> bool:
        with eager(comm) as part, pytest.MonkeyPatch.context() as context:
            if comm.rank == 1:
                context.setattr(f"unisono.transports.shm.{name}", lambda: value)
            with part.dup() as other:
                return other.ready(other.empty(400)) is None

    assert PAIR(program) == [True, True]


def test_what_is_no_tensor_is_refused() -> None:
    def program(comm: un.Communicator) -> None:
        with pytest.raises(TypeError, match=r"the memory must be a torch\.Tensor, not str"):
            comm.ready("memory")

    PAIR(program)
