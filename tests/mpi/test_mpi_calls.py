"""Calls of the MPI backend: blocking and asynchronous ones meet, and what is wrong is refused."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unisono as un
from unisono.testing.cases import Case
from unisono.testing.check_case import Report, check_case, check_reports
from unisono.testing.pools import RankPool
from unisono.testing.strategies import cases

RANKS = 3


@settings(max_examples=settings.default.max_examples // 2)
@given(case=cases(RANKS), long=st.sets(st.integers(0, RANKS - 1), max_size=RANKS - 1))
def test_blocking_and_asynchronous_calls_match(ranks: RankPool, case: Case, long: set[int]) -> None:
    def program(comm: un.Communicator, case: Case, long: set[int]) -> Report:
        return check_case(comm, replace(case, async_op=comm.rank in long))

    case = replace(case, algorithm=None)
    check_reports(case, ranks.run(program, case, long))


@given(
    rows=st.lists(st.lists(st.floats(width=32), min_size=RANKS, max_size=RANKS), min_size=1, max_size=5),
    op=st.sampled_from(["min", "max"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    long=st.sets(st.integers(0, RANKS - 1), max_size=RANKS),
)
def test_extreme_floats_are_bitwise_equal_on_all_ranks(
    ranks: RankPool, rows: list[list[float]], op: str, dtype: torch.dtype, long: set[int]
) -> None:
    def program(comm: un.Communicator, given: torch.Tensor, op: str, long: set[int]) -> torch.Tensor:
        tensor = given[comm.rank].clone(memory_format=torch.contiguous_format)
        if work := comm.all_reduce(tensor, op, async_op=comm.rank in long):
            work.wait()
        return tensor

    given_ = torch.tensor(rows, dtype=dtype).t().contiguous()
    first, *others = ranks.run(program, given_, op, long)
    assert torch.equal(first.nan_to_num(0.5), getattr(given_, f"a{op}")(0).nan_to_num(0.5))
    assert torch.equal(first.isnan(), given_.isnan().any(0))
    for other in others:
        assert torch.equal(other.view(torch.uint8), first.view(torch.uint8))
    # Of zeros of both signs, a maximum is the positive one; the sign of equal ones stays.
    signs = getattr(given_.signbit(), "all" if op == "max" else "any")(0)
    zeros = first == 0
    assert torch.equal(first.signbit()[zeros], (signs & (given_ == 0).any(0) if op == "max" else signs)[zeros])


def test_inference_tensors_are_averaged_outside_inference_mode(ranks: RankPool) -> None:
    def program(comm: un.Communicator) -> list[float]:
        comm.barrier()
        found = []
        for op in ("avg", "max", "min"):
            with torch.inference_mode():
                tensor = torch.tensor([float(comm.rank)])
            comm.all_reduce(tensor, op)
            found.append(tensor.item())
        return found

    assert ranks.run(program) == [[(RANKS - 1) / 2, RANKS - 1.0, 0.0]] * RANKS


def test_long_gather_is_split_on_all_ranks(ranks: RankPool) -> None:
    def program(comm: un.Communicator) -> list[float]:
        from unisono.transports.mpi import collectives

        before, collectives.MOST_BYTES = collectives.MOST_BYTES, 2047
        try:
            # Each rank's part is short enough for one call, and the root's list is not.
            comm.barrier()
            part, root = torch.full((200,), float(comm.rank)), comm.rank == 0
            parts = [torch.zeros(200) for _ in range(comm.size)] if root else None
            comm.gather(part, parts, 0)
            back = torch.zeros(200)
            comm.scatter(back, parts, 0)
        finally:
            collectives.MOST_BYTES = before
        return back.unique().tolist()

    assert ranks.run(program) == [[float(rank)] for rank in range(RANKS)]


def test_output_may_alias_this_ranks_part(ranks: RankPool) -> None:
    def program(comm: un.Communicator) -> list[list[float]]:
        found, me = [], float(comm.rank)
        whole = torch.full((2 * comm.size,), -1.0)
        parts = whole.split(2)
        parts[comm.rank].fill_(me)
        comm.all_gather_single(whole, parts[comm.rank])
        found.append(whole.tolist())
        for turned in (parts, [part.clone() for part in reversed(parts)]):
            turned[comm.rank].fill_(me)
            comm.all_gather(turned, turned[comm.rank])
            found.append(torch.cat(list(turned)).tolist())
        rows = torch.arange(2.0 * comm.size) + 10 * me
        swapped = torch.zeros(2 * comm.size)
        comm.all_to_all_single(swapped, rows)
        found.append(swapped.tolist())
        return found

    in_order = [float(rank) for rank in range(RANKS) for _ in range(2)]
    for rank, found in enumerate(ranks.run(program)):
        swapped = [10.0 * source + 2 * rank + i for source in range(RANKS) for i in range(2)]
        assert found == [in_order, in_order, in_order, swapped]


def test_overlapping_tensors_are_rejected_without_effect(ranks: RankPool) -> None:
    def program(comm: un.Communicator) -> tuple[list[str], float]:
        memory, said = torch.zeros(3 * comm.size), []
        everything = memory[: 2 * comm.size]
        calls = (
            lambda: comm.all_gather_single(everything, memory[1:3]),
            lambda: comm.all_gather([memory[:2], memory[1:3], memory[4:6]], memory[7:9]),
            lambda: comm.all_gather(list(everything.split(2)), memory[1:3]),
            lambda: comm.all_to_all_single(everything, memory[3:]),
            lambda: comm.all_to_all(list(everything.split(2)), list(memory[3:].split(2))),
        )
        for call in calls:
            try:
                call()
            except ValueError as error:
                said.append(str(error))
        one = torch.ones(1)
        comm.all_reduce(one)
        return said, one.item()

    for said, total in ranks.run(program):
        assert len(said) == 5
        assert all("share memory" in sentence for sentence in said)
        assert total == RANKS


def test_wrong_arguments_are_rejected_without_effect(ranks: RankPool) -> None:
    def program(comm: un.Communicator) -> tuple[dict[str, str], float]:
        said, size = {}, comm.size

        def one() -> torch.Tensor:
            return torch.ones(size)

        comm.broadcast(one(), 0)
        wrong = {
            "a list": lambda: comm.all_reduce([one()]),
            "a list for a tensor": lambda: comm.all_gather_single([torch.ones(size * size)], one()),
            "a tensor for a list": lambda: comm.all_gather(one(), one()),
            "no input": lambda: comm.all_gather_single(one(), None),
            "no output": lambda: comm.reduce_scatter_single(None, one()),
            "no operation": lambda: comm.all_reduce(one(), ""),
            "None for an operation": lambda: comm.all_reduce(one(), None),
            "a list for an operation": lambda: comm.all_reduce(one(), []),
            "a root that is a float": lambda: comm.broadcast(one(), 0.0),
            "a root that is a list": lambda: comm.broadcast(one(), []),
        }
        for what, call in wrong.items():
            try:
                call()
            except (TypeError, ValueError) as error:
                said[what] = str(error)
        last = torch.ones(1)
        comm.all_reduce(last)
        return said, last.item()

    for said, total in ranks.run(program):
        assert said == {
            "a list": "the tensor is a list of Tensor; pass one tensor or array, or a list of numbers",
            "a list for a tensor": "output is a list of Tensor; pass one tensor or array, or a list of numbers",
            "a tensor for a list": "tensor_list must be a list of tensors, not Tensor",
            "no input": "input must be a torch.Tensor, an array, a buffer or numbers, not NoneType",
            "no output": "output must be a torch.Tensor, an array, a buffer or numbers, not NoneType",
            **{
                what: f"unknown reduce operation {op}; known: sum, avg, product, min, max, band, bor, bxor"
                for what, op in {
                    "no operation": "''",
                    "None for an operation": "None",
                    "a list for an operation": "[]",
                }.items()
            },
            "a root that is a float": "src must be an int, not float",
            "a root that is a list": "src must be an int, not list",
        }
        assert total == RANKS


@settings(max_examples=settings.default.max_examples // 2)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 7, 1014, 1015, 5000]), min_size=1, max_size=4),
    tags=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    later=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_messages_of_all_functions_match(ranks: RankPool, sizes: list[int], tags: list[int], later: list[bool]) -> None:
    def program(comm: un.Communicator, sizes: list[int], tags: list[int], later: list[bool]) -> list[bool]:
        right = []
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for number, (size, tag) in enumerate(zip(sizes, tags, strict=False)):
            sent, got = torch.arange(float(size)) + comm.rank, torch.zeros(size)
            receive = comm.irecv(got, before, tag) if comm.rank == 0 or later[2 * number + 1] else None
            send = comm.isend(sent, after, tag) if later[2 * number] else comm.send(sent, after, tag)
            comm.recv(got, before, tag) if receive is None else receive.wait()
            if send is not None:
                send.wait()
            right.append(torch.equal(got, torch.arange(float(size)) + before))
        return right

    for right in ranks.run(program, sizes, tags, later):
        assert right == [True] * len(sizes)


def test_message_of_wrong_size_is_reported(ranks: RankPool) -> None:
    def program(comm: un.Communicator) -> str:
        # What breaks is a part, so that the job serves the next tests.
        part = comm.dup()
        try:
            if part.rank == 0:
                part.send(torch.zeros(3), 1)
            if part.rank == 1:
                part.recv(torch.zeros(3, dtype=torch.int32), 0)
            part.barrier()
        except un.errors.CommError as error:
            return str(error)
        return ""

    for said in ranks.run(program):
        assert "rank 0 sent 3 elements of float32, but the receive on rank 1 expects 3 elements of int32" in said
