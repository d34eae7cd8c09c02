"""Collectives on the MPI backend at eight ranks."""

from __future__ import annotations

from random import Random

import pytest

import unisono as un
from unisono.core.collective import COLLECTIVES
from unisono.testing.cases import CALLS, Case
from unisono.testing.check_case import check_case, check_reports
from unisono.testing.memory_layouts import LAYOUTS
from unisono.testing.pools import RankPool
from unisono.testing.reference import DTYPES, ops_for

RANKS = 8


def sample(call: str) -> list[Case]:
    """All dtypes, with everything else by chance, the same every time."""
    chance = Random(f"{call} {RANKS}")
    return [
        Case(
            call,
            RANKS,
            chance.choice((0, 1, 7, 8, 9, 1000, 5000)),
            dtype,
            chance.choice(ops_for(dtype)) if COLLECTIVES[call].reduces else ops_for(dtype)[0],
            chance.randrange(RANKS) if COLLECTIVES[call].root else 0,
            chance.choice(LAYOUTS),
            async_op=chance.random() < 0.3,
            uneven=chance.random() < 0.5,
            numbers=chance.choice(("whole", "any", "nan")),
            seed=seed,
        )
        for seed, dtype in enumerate(DTYPES)
    ]


@pytest.mark.soak
def test_every_collective_equals_reference() -> None:
    def program(comm: un.Communicator, cases: list[Case]) -> list[object]:
        return [check_case(comm, case) for case in cases]

    with RankPool(RANKS, "mpi", timeout=60) as ranks:
        for call in CALLS:
            cases = sample(call)
            for case, *reports in zip(cases, *ranks.run(program, cases), strict=True):
                check_reports(case, reports)


@pytest.mark.soak
def test_subgroups_of_eight_run_concurrently() -> None:
    def program(comm: un.Communicator) -> tuple[int, int]:
        import torch

        part = comm.split(comm.rank % 3)
        mine, all_of_us = torch.tensor([comm.rank]), torch.tensor([1])
        part.all_reduce(mine)
        comm.all_reduce(all_of_us)
        return int(mine), int(all_of_us)

    with RankPool(RANKS, "mpi", timeout=60) as ranks:
        assert ranks.run(program) == [({0: 9, 1: 12, 2: 7}[rank % 3], 8) for rank in range(RANKS)]
