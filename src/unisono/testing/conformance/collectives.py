"""Checks for collectives: whatever the arguments, each result equals the reference; see `unisono.testing.cases`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from random import Random

import torch

from unisono.collectives.algorithms import find, serving
from unisono.communicator import Communicator
from unisono.core.collective import COLLECTIVES
from unisono.core.types import ReduceOp
from unisono.testing.cases import CALLS, Case
from unisono.testing.check_case import Report, check_case, check_reports
from unisono.testing.conformance.world import World, numbers
from unisono.testing.memory_layouts import LAYOUTS
from unisono.testing.reference import DTYPES, EXACT, ops_for

__all__ = [
    "barrier_waits_for_all_ranks",
    "concurrent_subgroups_equal_reference",
    "equals_reference",
    "every_op_and_dtype_equals_reference",
    "native_collective_is_selectable_by_name",
    "objects_arrive_on_all_ranks",
    "results_are_bitwise_reproducible",
]

_SIZES = (1, 2, 3, 4)


def equals_reference(call: str) -> Callable[[World], None]:
    """Return the check of one collective: every algorithm, with a sample of dtypes, ops, roots, counts and layouts."""

    def check(world: World) -> None:
        for size in _SIZES:
            _hold(world, list(_sample(world, call, size)), size)

    check.__name__ = f"{call}_equals_reference"
    check.__doc__ = f"{call} by every algorithm, for some of all dtypes, ops, roots, counts and layouts."
    return check


def every_op_and_dtype_equals_reference(world: World) -> None:
    """Results of all pairs of op and dtype equal the reference, with and without NaN, with the default algorithm."""
    for size in (2, 3):
        cases = [
            Case("all_reduce", size, count, dtype, op, numbers=kind, seed=count)
            for dtype in DTYPES
            for op in ops_for(dtype)
            for kind, count in (("any", 7), ("nan", 40))
        ]
        _hold(world, cases, size)


def results_are_bitwise_reproducible(world: World) -> None:
    """Rounding is the same on all ranks and in the next run, with any algorithm."""
    ops = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT)
    for size in (3, 4):
        named = enumerate(serving("all_reduce", size), size)
        chosen = [*((None, op) for op in ops), *((algorithm, ops[number % 3]) for number, algorithm in named)]
        cases = [
            Case("all_reduce", size, 1500, torch.float32, op, algorithm=algorithm, numbers="any")
            for algorithm, op in chosen
        ]
        assert _hold(world, cases, size) == _hold(world, cases, size), "a second run gave other bits"


def concurrent_subgroups_equal_reference(world: World) -> None:
    """Sub-groups of different sizes run different collectives at the same time, and each gets its own result."""
    parts = [[0, 2, 3], [1]], [[0, 3], [2, 1]]
    for groups in parts:
        cases = {
            len(groups[0]): [Case(call, len(groups[0]), 50, torch.int32) for call in ("all_reduce", "all_to_all")],
            len(groups[1]): [Case(call, len(groups[1]), 21, torch.float64) for call in ("all_gather", "all_reduce")],
        }

        def program(comm: Communicator, groups: list[list[int]], cases: dict[int, list[Case]]) -> list[Report]:
            color = 0 if comm.rank in groups[0] else 1
            part = comm.split(color, key=groups[color].index(comm.rank))
            return [check_case(part, case) for case in cases[part.size]]

        found = world.run(program, groups, cases, size=4)
        for group in groups:
            for case, *reports in zip(cases[len(group)], *(found[rank] for rank in group), strict=True):
                check_reports(case, reports)


def native_collective_is_selectable_by_name(world: World) -> None:
    """`algorithm="native"` equals the reference, or raises an error that lists the available algorithms."""

    def program(comm: Communicator, case: Case) -> Report | str:
        try:
            return check_case(comm, case)
        except ValueError as error:
            return str(error)

    for call in CALLS:
        case = Case(call, 2, 10, algorithm="native")
        found = world.run(program, case)
        if isinstance(found[0], str):
            known = serving(COLLECTIVES[call].family, size=2)
            assert all("no native" in message and known[0] in message for message in found), found
        else:
            check_reports(case, found)


def barrier_waits_for_all_ranks(world: World) -> None:
    """No rank leaves the barrier before the last rank has entered it, with any algorithm."""

    def program(comm: Communicator, algorithm: str | None, last: int) -> tuple[float, float]:
        others = [rank for rank in range(comm.size) if rank != last]
        # Every other rank sends a message to `last` just before it enters the barrier. Rank `last` enters the barrier
        # after it has received all messages.
        if comm.rank == last:
            for rank in others:
                comm.recv(numbers(comm, 0), rank)
        else:
            comm.send(numbers(comm, 0), last)
        came = time.monotonic()
        comm.barrier(algorithm=algorithm)
        return came, time.monotonic()

    for algorithm in [None, *serving("barrier", size=4)]:
        for last in range(4):
            found = world.run(program, algorithm, last, size=4)
            assert max(came for came, _ in found) <= min(left for _, left in found), f"{algorithm}: {found}"


def objects_arrive_on_all_ranks(world: World) -> None:
    """The four object collectives transfer plain values of different lengths, from and to each rank."""

    def program(comm: Communicator) -> list[object]:
        mine = {"rank": comm.rank, "text": "é" * comm.rank, "tensor": torch.arange(comm.rank), "nothing": None}
        found: list[object] = [_plain(value) for value in comm.all_gather_object(mine)]
        for root in range(comm.size):
            gathered = comm.gather_object(mine, root)
            assert (gathered is None) == (comm.rank != root)
            parts = [[root, rank] for rank in range(comm.size)] if comm.rank == root else None
            assert comm.scatter_object(parts, root) == [root, comm.rank]
            found.append(_plain(comm.broadcast_object(mine if comm.rank == root else None, root)))
        return found

    wanted = [(rank, "é" * rank, list(range(rank)), None) for rank in range(3)] * 2
    for found in world.run(program, size=3):
        assert found == wanted, found


def _plain(value: dict[str, object]) -> tuple[object, ...]:
    tensor = value["tensor"]
    assert isinstance(tensor, torch.Tensor)
    return value["rank"], value["text"], tensor.tolist(), value["nothing"]


def _hold(world: World, cases: list[Case], size: int) -> list[str]:
    """Check many cases in one program, which is faster than a program per case; return rank 0's digests."""
    found = world.run(_check_all, cases, size=size)
    for case, *reports in zip(cases, *found, strict=True):
        check_reports(case, reports)
    return [report.digest for report in found[0]]


def _check_all(comm: Communicator, cases: list[Case]) -> list[Report]:
    return [check_case(comm, case) for case in cases]


def _sample(world: World, call: str, size: int) -> Iterator[Case]:
    """Yield each algorithm's cases: counts at which errors are likely, and other parameters from a seeded generator.

    For a named algorithm, half of the counts are tested on an odd number of ranks, and the other half on an even
    number.
    """
    chance = Random(f"{call} {size}")
    family = COLLECTIVES[call].family
    for number, algorithm in enumerate([None, *serving(family, size, rounded=False, uneven=False)]):
        limits = find(family, algorithm) if algorithm else None
        dtypes = DTYPES if limits is None or limits.same_bits else EXACT
        for seed, count in enumerate((0, 1, size - 1, size, size + 1, 12, 97, None)):
            if algorithm and (number + size + seed + seed // 4) % 2:
                continue
            dtype = chance.choice(dtypes)
            # A sum reveals an element that was reduced twice or not at all; a maximum often does not.
            ops = ops_for(dtype)[:1] if seed % 2 else ops_for(dtype)
            yield Case(
                call,
                size,
                world.chunk_bytes // dtype.itemsize + 1 if count is None else count,
                dtype,
                chance.choice(ops) if COLLECTIVES[call].reduces else ops[0],
                chance.randrange(size) if COLLECTIVES[call].root else 0,
                chance.choice(LAYOUTS),
                algorithm,
                async_op=chance.random() < 0.5,
                uneven=seed % 4 > 1 and not (limits and limits.uniform),
                numbers=chance.choice(("whole", "any", "nan")),
                seed=seed,
            )
